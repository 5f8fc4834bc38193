"""Record a real chat as a picture for the docs, without retouching.

python lab/pictures/chat.py docs/images/chat.svg --demo --temperature 0 --width 106 3 /why
"""

from __future__ import annotations

import argparse
import io
import re
from contextlib import ExitStack
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from agent_r1.inference.agent import find_model, open_agent
from agent_r1.inference.chat import Repl
from agent_r1.inference.screen import Screen

# Without rich's web fonts: a picture in the docs must not access the network.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("out", type=Path)
parser.add_argument("lines", nargs="+", help="what to type")
parser.add_argument("--run")
parser.add_argument("--demo", action="store_true", help="the agent that ships with the repository")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--width", type=int, default=92)
arguments = parser.parse_args()

# Not a terminal, so that nothing moves, but with its colours.
console = Console(
    file=io.StringIO(),
    record=True,
    width=arguments.width,
    color_system="truecolor",
    force_terminal=False,
    highlight=False,
)
with ExitStack() as resources:
    agent = resources.enter_context(open_agent(*find_model(arguments.run, demo=arguments.demo)))
    repl = Repl(agent, Screen(console, agent.config.env), resources, arguments.seed)
    repl.conversation.temperature = arguments.temperature
    repl.suggest()
    for line in arguments.lines:
        console.print(Text.assemble(("> ", "bold cyan"), line))
        repl.handle(line)
arguments.out.write_text(console.export_svg(title="agent-r1 chat", code_format=FORMAT))

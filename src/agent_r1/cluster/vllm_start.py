"""Start vLLM's server, after its parser of tool calls was made for this model.

In: the options of vLLM's server. Out: the server, or an exit with the parser's own error. The
Python that has vLLM runs this file, and may not have agent_r1: nothing of it is imported here.

vLLM makes its parsers when the first client asks for tools, after minutes of loading. Some refuse a
model's vocabulary. So the parser is made here first, by vLLM's own manager.
"""

from __future__ import annotations

import argparse
import runpy
import sys

SERVER = "vllm.entrypoints.openai.api_server"


def make_parser_of_calls(words: list[str]) -> None:
    """Make the parser that `words`, the server's options, name. Raises what the parser raises."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--tool-call-parser")
    options, _ = parser.parse_known_args(words)
    if options.tool_call_parser is None:
        return
    from transformers import AutoTokenizer
    from vllm.tool_parsers import ToolParserManager

    make_parser = ToolParserManager.get_tool_parser(options.tool_call_parser)
    make_parser(AutoTokenizer.from_pretrained(options.model))


# vLLM's engine is a process of its own, which imports this file under another name.
if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have common names, such as serve and chat
    make_parser_of_calls(sys.argv[1:])
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)

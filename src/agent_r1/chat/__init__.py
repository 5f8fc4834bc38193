"""Turn messages into token ids, exactly as a model's chat template does.

`format.py` is on the reading path: messages to ids, safely. `tokenizer.py` opens the format of a
model folder. The rest makes any template exact, or refuses it:

- `turn_ends.py` has the tokens that end a turn: several for some families
- `template.py` renders a template, and hides control tokens in the contents
- `guard.py` does so for what else a template prints: roles, names, tools
- `renderer.py` gives a template a process of its own, because a stranger wrote it
- `study.py` studies how a template writes a turn
- `probe.py` compares tokens
- `fit.py` compares the calls of a template and a dialect
- `start.py` checks the model that a run starts from
"""

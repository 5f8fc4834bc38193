"""Turn messages into token ids, exactly as a model's chat template does.

`format.py` is on the reading path: messages to ids, safely. `tokenizer.py` opens the format of a
model folder. The rest makes any template exact, or refuses it:

- `template.py` renders a template
- `facts.py` studies how a template writes a turn
- `probe.py` compares tokens
- `fit.py` compares the calls of a template and a dialect
- `start.py` checks the model that a run starts from
"""

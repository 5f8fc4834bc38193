"""Turn messages into token ids, exactly as a model's chat template does.

`format.py` is on the reading path: messages to ids, safely. `tokenizer.py` opens the format of a
model folder. The rest makes any template exact, or refuses it: `template.py` renders, `facts.py`
studies how a template writes a turn, `probe.py` compares tokens, `fit.py` compares a dialect's
calls, and `start.py` asks all of them about the model that a run starts from.
"""

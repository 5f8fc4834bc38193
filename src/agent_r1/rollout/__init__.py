"""Room 5, rollout: tokens in, tokens out.

Read `core.py` (the words), then `chat_format.py` (messages -> ids, safely), `episode.py` (the loop between policy and environment),
`training_rows.py` (trajectory -> training sequences and masks), `decoder.py` and `sampler.py` (a model and a sampler in plain
PyTorch that implement `Policy` in this process). `health.py` refuses episodes in which the world failed. `policies.py` has two
more ways to a model, `evaluate.py` the card of honest numbers, `records.py` a trajectory as a line of JSON.
"""

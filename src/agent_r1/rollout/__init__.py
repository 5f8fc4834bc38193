"""Room 5, rollout: tokens in, tokens out.

Read `core.py` (the words), then `chat_format.py` (messages -> ids, safely), `episode.py` (the loop
between policy and environment), `rows.py` (trajectory -> training sequences and masks), `decoder.py` and `sampler.py` (a model
and a sampler in plain PyTorch that implement `Policy` in this process). `failures.py` refuses episodes that the world has failed.
`policies.py` has two more ways to a model, `evaluate.py` the card of honest numbers, `records.py` a trajectory as a line of
JSON.
"""

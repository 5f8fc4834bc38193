"""Room 5, rollout: play episodes and record their tokens.

Read `core.py` first, then these in order:

- `chat_format.py`: messages to ids, safely
- `episode.py`: the loop between policy and environment
- `rows.py`: trajectories to training sequences and masks
- `decoder.py` and `sampler.py`: a model and a sampler in plain PyTorch

`health.py` refuses failed episodes, `policies.py` has two more policies, `evaluate.py` makes the evaluation card, and
`records.py` writes a trajectory as JSON.
"""

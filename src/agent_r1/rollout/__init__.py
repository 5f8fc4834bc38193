"""Room 5, rollout: play episodes and record their tokens.

Read `core.py` first, then these in order:

- `chat_format.py`: messages to ids, safely
- `episode.py`: the loop between policy and environment
- `sampling.py`: the choice of a token and its log-probability
- `training_rows.py`: trajectories to training sequences and masks
- `decoder.py`, `kv_cache.py` and `sampler.py`: a model and many episodes at once, in plain PyTorch

`template.py` renders chat templates, `columns.py` has the extra inputs of estimators, and
`rollouts.py` runs the episodes of a step, and stops if most fail. `policies.py` has two more
policies, `evaluate.py` makes the evaluation card, `reliability.py` adds pass@k and pass^k to it,
and `records.py` writes a trajectory as JSON.
"""

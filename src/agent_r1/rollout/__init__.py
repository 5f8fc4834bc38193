"""Room 6, rollout: play episodes and record their tokens.

Read `core.py` and `chat/format.py` first, then these in order:

- `episode.py`: the loop between policy and environment
- `training_rows.py`: trajectories to training sequences and masks

`setup.py` makes the configured loop, `rollouts.py` runs the episodes of a step, and stops if most
fail. `columns.py` has the extra inputs of estimators, and `agent.py` holds an opened model.
"""

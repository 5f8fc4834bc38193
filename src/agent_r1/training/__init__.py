"""Room 8, training: learn from episodes.

Read `advantages.py`, `losses.py`, then `loop.py`, which calls them.

`parts.py` makes what settings choose, `batches.py` a step's batch, `prefix_tree.py` its
micro-batches, and `learner.py` what learns. `forward.py` computes log-probabilities and values,
`metrics.py` averages. recipes/credit has more estimators. Around the loop: `run.py` (a run on
disk), `run_dir.py`, `checkpoint.py`, `fsdp_merge.py`, `plan_local.py`.
"""

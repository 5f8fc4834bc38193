"""Room 7: how the agent learns. Read `advantages.py`, `losses.py`, then `loop.py`, which calls them.

`parts.py` puts together what settings choose, `batches.py` what a step sees, and `learner.py` holds what learns. `forward.py`
computes log-probabilities and values, `metrics.py` averages. More ways to give credit: recipes/credit. Around the loop: `run.py`
(a run on disk), `checkpoint.py`, `fsdp_merge.py`, `log.py`, `dashboard.py`. Before it:
`tiny_model.py`, `demonstrate.py`, `clone.py`.
"""

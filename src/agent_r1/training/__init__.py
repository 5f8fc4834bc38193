"""Room 7: how the agent learns. Read `advantages.py`, `losses.py`, then `loop.py`, which calls them.

`estimators.py` has the estimators beside grpo and ppo, `batches.py` chooses what a step sees, `learner.py` holds what learns,
`forward.py` computes log-probabilities and values, `metrics.py` averages. Around the loop: `run.py` (a run on disk),
`checkpoint.py`, `shards.py`, `log.py`, `dashboard.py`. Before it: `tiny_model.py`, `cold_start.py`, `other_names.py`.
"""

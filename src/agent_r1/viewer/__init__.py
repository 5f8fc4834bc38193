"""Look inside: what a run did, token by token and curve by curve.

In: a run directory (`config.yaml`, `metrics.jsonl`, `eval*.json`, `rollouts/*.jsonl`). Out: pictures for people;
no other room reads them. Start with `tokens.py` (one training sequence, every token with its mask), then `report.py` and its
template (report.html).
"""

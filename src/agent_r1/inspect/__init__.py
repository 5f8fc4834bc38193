"""Look inside: what a run did, token by token and curve by curve.

In: a run directory (`config.yaml`, `metrics.jsonl`, `eval*.json`, `rollouts/*.jsonl`). Out: pictures for people;
no other room reads them. Start with `tokens.py` (one training row, every token with its mask), then `run_files.py`
(a run directory in memory), `charts.py` (curves as SVG and PNG) and `report.py` (report.html).
"""

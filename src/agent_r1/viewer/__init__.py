"""Show a run: its tokens with masks, and its curves.

In: a run directory (`config.yaml`, `metrics.jsonl`, `eval*.json`, `rollouts/*.jsonl`). Out:
pictures for people; no other package reads them. Start with `tokens.py` (one training sequence),
then `report.py` and its template (report.html).
"""

"""Show what happened in a run: its metrics, curves, tokens, and signs of trouble.

`log.py` writes metrics.jsonl, `dashboard.py` shows a run live, `sentinel.py` names signs of
trouble, with the causes in `causes.py`. `report.py` writes report.html from a run's folder, and
`tokens.py` shows one training sequence with its masks.
"""

"""Measure how good a model is.

- `evaluate.py` plays questions and makes the card
- `reliability.py` adds pass@k and pass^k
- `compare.py` evaluates any models, and compares two
- `power.py` plans an evaluation
- `records.py` writes a trajectory as JSON
- `provenance.py` records what a result was made from
"""

"""Measure how good a model is.

- `evaluate.py` plays questions and scores them
- `card.py` makes the card of an agent, and compares two cards
- `reliability.py` adds pass@k and pass^k
- `compare.py` evaluates any models, one or two
- `power.py` plans an evaluation
- `records.py` writes a trajectory as JSON
- `provenance.py` records what a result was made from
"""

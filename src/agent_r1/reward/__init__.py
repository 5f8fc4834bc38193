"""Room 7, reward: score a finished episode. Read `qa.py`; `scorers.py` compares answers."""

"""Room 9, inference: what the agent became. `evaluate.py` measures it."""

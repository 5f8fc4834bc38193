"""Make the model that RL starts from: the stage before RL.

`stage.py` is the stage, and the others are its parts:

- `tiny_model.py` makes the initial weights
- `demonstrate.py` plays or reads demonstrations
- `clone.py` imitates them, and `muon.py` is its optimiser
- `probe.py` measures whether RL can learn from the result
"""

"""Make the model that RL starts from: the stage before RL.

`stage.py` is the stage. `tiny_model.py` makes the initial weights, `demonstrate.py` plays or reads
demonstrations, `clone.py` imitates them, with `muon.py` as its optimiser, and `probe.py` asks
whether RL can learn from the result.
"""

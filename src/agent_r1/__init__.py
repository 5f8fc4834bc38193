"""Agent-R1: train LLM agents end to end with multi-turn reinforcement learning, and read how it works.

The packages are numbered rooms; read them in this order (docs/architecture.md follows one question through them):

    1 data -> 2 search -> 3 tool -> 4 env -> 5 rollout -> 6 reward -> 7 training -> 8 verl_engine -> 9 inference
"""

__version__ = "0.1.0"

"""Room 5, rollout: tokens in, tokens out.

Read `types.py` (the words), `chat_format.py` (messages -> ids, safely), `episode.py` (the loop between policy and
environment), `rows.py` (trajectory -> training rows and masks), then `qwen.py` and `engine.py` (a model and a sampler
in plain PyTorch that implement `Policy` in this process).
"""

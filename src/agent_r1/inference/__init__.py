"""Evaluate, export, serve and chat with trained agents, with training's episode loop and limits.

`agent.py` finds and opens a model, `serve.py` runs vLLM, `export.py` writes a checkpoint for
others. `provenance.py` records what a result was made from. `compare.py` evaluates any model on any
questions, or compares two. `conversation.py` puts questions to the episode loop; `screen.py` and
`chat.py` show them.
"""

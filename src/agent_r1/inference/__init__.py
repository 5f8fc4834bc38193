"""Use a trained agent, with training's episode loop and limits: open, chat, play, export.

`agent.py` finds and opens a model, `export.py` writes a checkpoint for others. `conversation.py`
puts questions to the episode loop; `screen.py` and `chat.py` show them. `play.py` lets a person
play. cluster/serve.py serves a model with vLLM, and evaluation/ measures it.
"""

"""Room 9, inference: what the agent became. The episode loop, tools and limits are those of training, whoever asks.

Read `agent.py` (which model is meant, and how it is opened), `serve.py` (a vLLM of our own), `export.py` (a checkpoint for
others to use), `provenance.py` (what a result was made from), `compare.py` (any model on any questions, and two against each
other), then `conversation.py` (questions to the episode loop), `screen.py` and `chat.py`.
"""

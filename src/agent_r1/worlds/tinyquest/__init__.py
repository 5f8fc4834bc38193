"""TinyQuest: a house to search, in the manner of ALFWorld (2010.03768). `agent-r1 train grpo --preset tinyquest`."""

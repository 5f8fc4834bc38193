"""TinyMath: sums in words that take two or three steps, for the tool `calculator`. `agent-r1 train grpo --preset tinymath`."""

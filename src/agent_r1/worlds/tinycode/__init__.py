"""TinyCode: small problems that a line of Python solves, for the tool `python`. `agent-r1 train grpo --preset tinycode`."""

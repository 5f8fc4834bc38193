"""The program: the command line (`cli.py`), the stages of a speedrun (`stages.py`), doctor, plan, and `agent-r1 new`."""

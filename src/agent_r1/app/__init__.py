"""Run the program: command line (`cli.py`), stages (`stages.py`), doctor, plan, `agent-r1 new`."""

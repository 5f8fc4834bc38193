"""The program: where things lie (`workspace.py`), the stages of a speedrun, the command line."""

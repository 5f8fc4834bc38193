"""Experiments whose figures stand in docs/; lab/README.md lists their commands."""

"""Experiments, rehearsals and pictures; README.md lists their commands."""

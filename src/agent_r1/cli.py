"""The command line, under its first name: see app/cli.py."""

from agent_r1.app.cli import main

__all__ = ["main"]

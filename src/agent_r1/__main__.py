"""Run `python -m agent_r1` as the command `agent-r1`."""

import sys

from agent_r1.app.cli import main

sys.exit(main())

"""Import the recipes of a checkout as `agent_r1_recipes`: they stand in recipes/ at its root.

Not a symbolic link, which some archives and checkouts do not keep. An installed package has no use
for this file: setup.py puts recipes/ itself in its place.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "recipes")]

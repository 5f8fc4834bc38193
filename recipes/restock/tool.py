"""The tool of the shop: subtraction."""

from agent_r1.tool import tool


@tool
def missing(want: int, have: int) -> int:
    """Compute how many are missing.

    Args:
        want: How many there should be.
        have: How many there are.
    """
    return want - have

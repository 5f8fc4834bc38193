"""Define what the agent can do. Any typed function with a docstring can be a tool."""

import operator
from typing import Literal

from agent_r1.tool import tool

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@tool
def calculate(left: int, operation: Literal["+", "-", "*"], right: int) -> str:
    """Calculate with two numbers.

    Args:
        left: The first number.
        operation: What to do with them.
        right: The second number.
    """
    return str(OPERATIONS[operation](left, right))

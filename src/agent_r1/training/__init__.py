"""Room 7: how the agent learns. Read `advantages.py`, then `losses.py`, then the loop that calls them."""

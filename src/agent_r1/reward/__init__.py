"""Room 6: what counts as good. A finished episode comes in, a number to maximise goes out. Read `qa.py`."""

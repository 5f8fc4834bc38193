"""Measure one GPU without network: parts alone, and a quarter of an hour (`quarter_hour.py`)."""

"""Measurements; README.md says which command gives which number."""

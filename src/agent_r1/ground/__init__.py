"""Provide what all other packages need: errors, files, bounds, device, messages."""

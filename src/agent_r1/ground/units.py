"""Name the units of memory and disk."""

GIB = 2**30

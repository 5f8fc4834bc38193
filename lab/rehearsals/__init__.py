"""Rehearse what takes too long for `make test`: `make long`.

One module a part; how to write one stands in `__main__.py`.
"""

"""Room 2, search: a corpus becomes an index, a query becomes passages. Read in this order:

    encoders.py   text -> unit vectors
    index.py      corpus.jsonl -> a FAISS index on disk -> the nearest passages
    coalescer.py  what running coroutines ask in the same moment, as one batch in a thread
    searcher.py   the queries of all running episodes, batched and cached
    service.py    the same for other processes, over HTTP: both sides

In comes `corpus.jsonl` of room 1 (`data/`); out go `Hit`s to the search tool of room 3 (`tool/search.py`).
"""

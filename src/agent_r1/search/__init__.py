"""Room 2, search: make an index of a corpus, and find passages. Read in this order:

    encoders.py   text -> unit vectors
    index.py      corpus.jsonl -> a FAISS index on disk -> the nearest passages
    coalescer.py    concurrent questions as one batch in a thread
    searcher.py   the queries of all running episodes, batched and cached
    service.py    the same for other processes, over HTTP
    remote.py     its client

In: `corpus.jsonl` of room 1 (`data/`). Out: `Hit`s for the search tool of room 3
(`tool/search.py`).
"""

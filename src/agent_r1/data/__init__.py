"""Room 1, data: make rows of questions, and a corpus of passages.

    source.py      the interface of a data set: recipes have them, such as TinyHop in recipes/laptop
    own_rows.py    user-defined questions
    splits.py      records -> train, val and test
    corpora.py     the passages to search
    build.py       any of these -> the files of a data set
    storage.py     rows, passages and their folder on disk
    release.py     a data card and hashes for others
    prompts.py     the prompts
    spellings.py   comparison of titles and questions despite different spellings

Next: room 2, `search/`, which indexes the corpus.
"""

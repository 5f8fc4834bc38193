"""Room 1, data: questions become rows, and what there is to know becomes a corpus.

    source.py      what a data set is: recipes bring them, such as TinyHop in recipes/laptop
    own_rows.py    questions of yours
    splits.py      records -> train, val and test
    corpora.py     the passages to search
    build.py       any of these -> the files of a data set
    storage.py     how rows, passages and their folder lie on disk
    prompts.py     what every agent is told
    spellings.py   titles and questions that are equal although their bytes differ

Next comes room 2, `search/`, which makes the corpus findable.
"""

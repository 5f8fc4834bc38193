"""Room 1, data: questions become rows, and what there is to know becomes a corpus.

    tinyhop.py     a world made from nothing, and questions about it (its words: tinyhop_words.py)
    forms.py       one question of HotpotQA, 2WikiMultihopQA, MuSiQue, GSM8K, DAPO-Math
    published.py   these sets, read from files or the hub and checked
    corpora.py     the passages of published sets
    build.py       any of these -> the files of a data set
    rows.py        how rows, passages and their folder lie on disk
    prompts.py     what every agent is told
    spellings.py   titles and questions that are equal although their bytes differ

Next comes room 2, `search/`, which makes the corpus findable.
"""

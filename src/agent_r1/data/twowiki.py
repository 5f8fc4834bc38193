"""2WikiMultihopQA (Ho et al. 2020): questions made from Wikidata, with the paragraphs and the facts behind them.

    {"_id": "...", "type": "bridge_comparison", "question": "...", "answer": "...", "evidences": [["A", "director", "B"]],
     "supporting_facts": [["Title", 0], ...], "context": [["Title", ["Sentence.", ...]], ...]}

HotpotQA's form, with other kinds: compositional, inference, comparison (two paragraphs each), bridge_comparison (four).
In: such a record. Out: a `Record`.
"""

from __future__ import annotations

from agent_r1.data import hotpotqa
from agent_r1.data.records import Dataset

TWOWIKI = Dataset(
    hub="framolfese/2WikiMultihopQA",
    config=None,
    revision="fe713bfbd1afbca1a65246741a75890405d56a3a",
    files={"train": "train.json", "validation": "dev.json"},
    counts={"train": 167454, "validation": 12576},
    parse=hotpotqa.parse,
    keys=hotpotqa.DISTRACTOR.keys,
)

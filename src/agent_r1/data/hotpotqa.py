"""HotpotQA (Yang et al. 2018): questions over two Wikipedia paragraphs, ten paragraphs with each.

    {"_id": "5a7a...", "question": "...", "answer": "...", "type": "bridge", "level": "hard",
     "supporting_facts": [["Title", 0], ...], "context": [["Title", ["First sentence.", " Second."]], ...]}

In: such a record, or the hub's form of it. Out: a `Record`. In the distractor setting the ten paragraphs hold the answer;
in fullwiki they are what a retriever found, so `data.corpus=contexts` makes a corpus that lacks some answers: take
beir-hotpotqa with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from agent_r1.data.records import Dataset, Record, paragraphs_of, supporting_of, text_of


def parse(record: Any) -> Record:
    """Raises BadRecord."""
    return Record(
        id=text_of(record, "_id" if isinstance(record, dict) and "_id" in record else "id"),
        question=text_of(record, "question"),
        answers=[text_of(record, "answer")],
        kind=text_of(record, "type"),
        hops=len(supporting := supporting_of(record)),
        paragraphs=paragraphs_of(record),
        supporting=supporting,
    )


DISTRACTOR = Dataset(
    hub="hotpotqa/hotpot_qa",
    config="distractor",
    revision="1908d6afbbead072334abe2965f91bd2709910ab",
    files={"train": "hotpot_train_v1.1.json", "validation": "hotpot_dev_distractor_v1.json"},
    counts={"train": 90447, "validation": 7405},
    parse=parse,
    keys=("question", "answer", "type", "supporting_facts", "context"),
)
FULLWIKI = dataclasses.replace(
    DISTRACTOR, config="fullwiki", files=DISTRACTOR.files | {"validation": "hotpot_dev_fullwiki_v1.json"}
)

"""MuSiQue-Ans (Trivedi et al. 2022): questions composed of two to four single-hop ones, with twenty paragraphs each.

    {"id": "3hop1__...", "question": "...", "answer": "...", "answer_aliases": ["..."], "answerable": true,
     "paragraphs": [{"idx": 0, "title": "...", "paragraph_text": "...", "is_supporting": false}, ...],
     "question_decomposition": [{"id": 1, "question": "...", "answer": "...", "paragraph_support_idx": 7}, ...]}

In: such a record, one a line. Out: a `Record`. MuSiQue-Full also has questions without an answer, which this project has
no reward for: they are refused.
"""

from __future__ import annotations

import re
from typing import Any

from agent_r1.data.records import BadRecord, Dataset, Record, list_of, text_of


def parse(record: Any) -> Record:
    """Raises BadRecord."""
    name = text_of(record, "id")
    hops = re.match(r"([2-4])hop", name)
    if not hops:
        raise BadRecord(f"the id {name} does not begin with its number of hops")
    if record.get("answerable") is False:
        raise BadRecord("without an answer; take MuSiQue-Ans")
    aliases = record.get("answer_aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise BadRecord("answer_aliases are no strings")
    paragraphs = list_of(record, "paragraphs", dict)
    supporting = [text_of(p, "title") for p in paragraphs if p.get("is_supporting") is True]
    if not supporting:
        raise BadRecord("no supporting paragraph")
    return Record(
        id=name,
        question=text_of(record, "question"),
        answers=list(
            dict.fromkeys([text_of(record, "answer"), *(alias.strip() for alias in aliases if alias.strip())])
        ),
        kind=f"{hops[1]}hop",
        hops=int(hops[1]),
        paragraphs=[(text_of(p, "title"), text_of(p, "paragraph_text")) for p in paragraphs],
        supporting=list(dict.fromkeys(supporting)),
    )


MUSIQUE = Dataset(
    hub="dgslibisey/MuSiQue",
    config=None,
    revision=None,
    files={"train": "musique_ans_v1.0_train.jsonl", "validation": "musique_ans_v1.0_dev.jsonl"},
    counts={"train": 19938, "validation": 2417},
    parse=parse,
    keys=("id", "question", "answer", "paragraphs"),
)

"""Parse the published forms of a question: HotpotQA's, 2WikiMultihopQA's, MuSiQue's.

In: what a file or the hub has, as JSON or a table's row. Out: a `Record`, the same for all. Next:
`published.py` reads files of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, StringConstraints


@dataclass(frozen=True)
class Record:
    """Hold one question of any data set."""

    id: str
    question: str
    answers: list[str]
    """The answer, then its aliases."""
    kind: str
    """What the data set calls this kind of question; the evaluation reports each."""
    hops: int
    paragraphs: list[tuple[str, str]]
    """(title, text): those that hold the answer, and distractors."""
    supporting: list[str]
    """Titles of the paragraphs that an answer takes."""


# ------------------------------------------------------------------------------ the published forms

NonEmptyText = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Id = Annotated[NonEmptyText, Field(validation_alias=AliasChoices("_id", "id"))]


def _pairs(value: Any) -> Any:
    """Accept both the JSON's [[title, x], ...] and the hub's {"title": [...], "x": [...]}."""
    if not isinstance(value, dict) or "title" not in value:
        return value
    columns = [column for key, column in value.items() if key != "title"]
    return list(zip(value["title"], *columns, strict=True))


class HotpotQA(BaseModel):
    """Parse HotpotQA (Yang et al. 2018): questions over two Wikipedia paragraphs, each with ten.

        {"_id": "5a7a...", "question": "...", "answer": "...", "type": "bridge", "level": "hard",
         "supporting_facts": [["Title", 0], ...],
         "context": [["Title", ["First sentence.", " Second."]], ...]}

    In the distractor setting the ten paragraphs contain the answer. In fullwiki they are a
    retriever's results, so a corpus of contexts lacks some answers: use beir-hotpotqa with it.
    """

    id: Id
    question: NonEmptyText
    answer: NonEmptyText
    type: NonEmptyText
    supporting_facts: Annotated[list[tuple[str, Any]], Field(min_length=1), BeforeValidator(_pairs)]
    context: Annotated[list[tuple[str, list[str]]], BeforeValidator(_pairs)]
    """Empty where a retriever found nothing; such a question can be asked over any other corpus."""

    def record(self) -> Record:
        supporting = list(dict.fromkeys(title.strip() for title, _ in self.supporting_facts))
        paragraphs = []
        for title, sentences in self.context:
            text = " ".join(sentence.strip() for sentence in sentences).strip()
            paragraphs.append((title.strip(), text))
        return Record(
            self.id,
            self.question,
            [self.answer],
            self.type,
            len(supporting),
            paragraphs,
            supporting,
        )


class TwoWiki(HotpotQA):
    """Parse 2WikiMultihopQA (Ho et al. 2020), made from Wikidata, in HotpotQA's form.

    Its kinds of questions are compositional, inference, comparison (two paragraphs each) and
    bridge_comparison (four). Its second release (data_ids.zip) also has the answer's id in
    Wikidata, and `id_aliases.json` next to the questions:

        {"Q_id": "Q30", "aliases": ["USA", ...], "demonyms": ["American", ...]}
    """

    answer_id: str | None = None


class MuSiQueParagraph(BaseModel):
    title: NonEmptyText
    paragraph_text: NonEmptyText
    is_supporting: bool = False


class MuSiQue(BaseModel):
    """Parse MuSiQue-Ans (Trivedi et al. 2022).

    A question is composed of two to four single-hop questions, and has twenty paragraphs.

        {"id": "3hop1__...", "question": "...", "answer": "...", "answer_aliases": ["..."],
         "answerable": true,
         "paragraphs": [{"idx": 0, "title": "...", "paragraph_text": "...",
                         "is_supporting": false}, ...], ...}

    MuSiQue-Full also has questions without an answer, which this project has no reward for.
    """

    id: Annotated[NonEmptyText, Field(pattern="^[2-4]hop")]
    question: NonEmptyText
    answer: NonEmptyText
    answer_aliases: list[str] | None = None
    answerable: bool | None = None
    paragraphs: list[MuSiQueParagraph]

    def record(self) -> Record:
        if self.answerable is False:
            raise ValueError("without an answer; use MuSiQue-Ans")
        supporting = list(dict.fromkeys(p.title for p in self.paragraphs if p.is_supporting))
        if not supporting:
            raise ValueError("no supporting paragraph")
        aliases = [alias.strip() for alias in self.answer_aliases or [] if alias.strip()]
        return Record(
            self.id,
            self.question,
            list(dict.fromkeys([self.answer, *aliases])),
            f"{self.id[0]}hop",
            int(self.id[0]),
            [(p.title, p.paragraph_text) for p in self.paragraphs],
            supporting,
        )

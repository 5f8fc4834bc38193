"""Small question sets in the published formats of HotpotQA, 2WikiMultihopQA and MuSiQue, made of
the true statements in facts.txt.

    python tests/hotpotqa_tiny/make.py [FOLDER]    two files of each, the same bytes each time
                                                   (default: this folder)

Each record has what HotpotQA's have: ten paragraphs, two of which hold the answer, and the
supporting facts. The blocks of facts.txt are separate worlds: the validation file asks about
people, works, cities and countries that the training file does not know, so that an answer can only
come out of what was read. (A river may flow through both.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
FILES = {"train": "hotpot_train_v1.1.json", "validation": "hotpot_dev_distractor_v1.json"}
TWOWIKI = {"train": "2wiki/train.json", "validation": "2wiki/dev.json"}
MUSIQUE = {
    "train": "musique/musique_ans_v1.0_train.jsonl",
    "validation": "musique/musique_ans_v1.0_dev.jsonl",
}


@dataclass
class Block:
    """One country and what is in it."""

    split: str
    country: tuple[str, str, str] = ("", "", "")
    """Name, capital, highest mountain."""
    cities: dict[str, str] = field(default_factory=dict)
    """Name -> river, or nothing."""
    people: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> profession, city of birth."""
    works: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Title -> kind, maker."""
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> kind, city."""

    def paragraphs(self) -> dict[str, list[str]]:
        """Title -> sentences."""
        country, capital, mountain = self.country
        found = {
            country: [
                f"{country} is a country.",
                f" Its capital is {capital} and its highest mountain is {mountain}.",
            ]
        }
        for city, river in self.cities.items():
            found[city] = [f"{city} is a city in {country}."] + (
                [f" It lies on the river {river}."] if river else []
            )
        found |= {
            name: [f"{name} was {a(what)} born in {city}."]
            for name, (what, city) in self.people.items()
        }
        found |= {
            title: [f"{title} is {a(kind)} by {maker}."]
            for title, (kind, maker) in self.works.items()
        }
        return found | {
            name: [f"{name} is {a(kind)} in {city}."] for name, (kind, city) in self.places.items()
        }


def a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def read_facts() -> list[Block]:
    blocks = []
    for part in re.split(r"\n\n+", (HERE / "facts.txt").read_text()):
        lines = [line for line in part.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        block = Block("validation" if lines[0] == "validation" else "train")
        for line in lines[lines[0] == "validation" :]:
            sort, name, *rest = (word.strip() for word in line.split("|"))
            if sort == "country":
                block.country = (name, *rest)
            elif sort == "city":
                block.cities[name] = rest[0] if rest else ""
            elif sort == "place":
                block.places[name] = (rest[0], rest[1])
            else:
                block.people[name] = (rest[0], rest[1])
                kind, _, titles = rest[2].partition(": ") if len(rest) > 2 else ("", "", "")
                block.works |= {title: (kind, name) for title in titles.split("; ") if title}
        blocks.append(block)
    return blocks


# ---------------------------------------------------------------------------------------- questions

Question = tuple[str, str, str, list[tuple[str, int]]]
"""Type, question, answer, supporting facts (title and number of the sentence)."""


def bridges(block: Block) -> Iterator[Question]:
    """Two paragraphs, the second of which is named in the first."""
    country, capital, mountain = block.country
    for work, (_, maker) in block.works.items():
        what, city = block.people[maker]
        yield (
            "bridge",
            f"In which city was the {what} of {work} born?",
            city,
            [(work, 0), (maker, 0)],
        )
    stays = [
        (f"where {person} was born", person, city) for person, (_, city) in block.people.items()
    ]
    stays += [(f"where {place} is", place, city) for place, (_, city) in block.places.items()]
    for where, start, city in stays:
        yield "bridge", f"In which country is the city {where}?", country, [(start, 0), (city, 0)]
        if river := block.cities[city]:
            yield "bridge", f"On which river lies the city {where}?", river, [(start, 0), (city, 1)]
    for city in block.cities:
        facts = [(city, 0), (country, 1)]
        yield (
            "bridge",
            f"What is the highest mountain of the country where {city} lies?",
            mountain,
            facts,
        )
        if city != capital:
            yield "bridge", f"What is the capital of the country where {city} lies?", capital, facts


def chains(block: Block) -> Iterator[Question]:
    """Three paragraphs: from a work by its maker to a city, and on."""
    for work, (_, maker) in block.works.items():
        what, city = block.people[maker]
        where, facts = f"where the {what} of {work} was born", [(work, 0), (maker, 0)]
        yield (
            "3hop1",
            f"In which country is the city {where}?",
            block.country[0],
            [*facts, (city, 0)],
        )
        if river := block.cities[city]:
            yield "3hop1", f"On which river lies the city {where}?", river, [*facts, (city, 1)]


def comparisons(block: Block) -> Iterator[Question]:
    """Two paragraphs, both named in the question; which of them comes first is left to chance."""
    rng = random.Random(block.country[0])
    for (one, (_, here)), (other, (_, there)) in itertools.pairwise(block.people.items()):
        facts = [(one, 0), (other, 0)]
        yield (
            "comparison",
            f"Were {one} and {other} born in the same city?",
            "yes" if here == there else "no",
            facts,
        )
        if here != there:
            first, second = rng.sample((one, other), 2)
            yield "comparison", f"Who was born in {there}, {first} or {second}?", other, facts
    for (one, river), (other, another) in itertools.pairwise(block.cities.items()):
        if river and another and river != another:
            first, second = rng.sample((one, other), 2)
            facts = [(one, 1), (other, 1)]
            yield (
                "comparison",
                f"Which city lies on the river {river}, {first} or {second}?",
                one,
                facts,
            )


def records(split: str, kinds=(bridges, comparisons)) -> list[dict]:
    """All questions of a split as HotpotQA publishes them."""
    rng = random.Random(split)
    blocks = [block for block in read_facts() if block.split == split]
    paragraphs = {title: text for block in blocks for title, text in block.paragraphs().items()}
    found = []
    for block in blocks:
        for kind, question, answer, facts in [one for make in kinds for one in make(block)]:
            needed = [title for title, _ in facts]
            others = rng.sample(sorted(paragraphs.keys() - set(needed)), 10 - len(needed))
            context = [[title, paragraphs[title]] for title in rng.sample(needed + others, 10)]
            found.append(
                {
                    "_id": hashlib.sha256(question.encode()).hexdigest()[:24],
                    "answer": answer,
                    "question": question,
                    "supporting_facts": [list(fact) for fact in facts],
                    "context": context,
                    "type": kind,
                    "level": "medium",
                }
            )
    rng.shuffle(found)
    return found


def as_twowiki(record: dict) -> dict:
    """2Wiki's kinds, and a path of evidence; it has no levels."""
    (one, _), (other, _) = record["supporting_facts"]
    kind = "compositional" if record["type"] == "bridge" else "comparison"
    evidence = [[one, "leads to", other]] if kind == "compositional" else [[one, "against", other]]
    return {key: record[key] for key in record if key != "level"} | {
        "type": kind,
        "evidences": evidence,
        "entity_ids": "",
        "evidences_id": [],
        "answer_id": None,
    }


def as_musique(record: dict) -> dict:
    """MuSiQue marks the paragraphs, and counts the hops in the id."""
    needed = [title for title, _ in record["supporting_facts"]]
    paragraphs = [
        {
            "idx": i,
            "title": title,
            "paragraph_text": "".join(sentences),
            "is_supporting": title in needed,
        }
        for i, (title, sentences) in enumerate(record["context"])
    ]
    steps = [
        {"id": i, "question": title, "answer": "", "paragraph_support_idx": 0}
        for i, title in enumerate(needed)
    ]
    return {
        "id": f"{len(needed)}hop__{record['_id']}",
        "paragraphs": paragraphs,
        "question": record["question"],
        "question_decomposition": steps,
        "answer": record["answer"],
        "answer_aliases": [],
        "answerable": True,
    }


def write(folder: Path) -> None:
    for split in FILES:
        asked, composed = records(split), records(split, (bridges, chains))
        texts = {
            FILES[split]: json.dumps(asked) + "\n",
            TWOWIKI[split]: json.dumps([as_twowiki(record) for record in asked]) + "\n",
            MUSIQUE[split]: "".join(json.dumps(as_musique(record)) + "\n" for record in composed),
        }
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

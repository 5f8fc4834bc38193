"""A small library in the published formats of HotpotQA, 2WikiMultihopQA and MuSiQue: 24 novels, 48 paragraphs, 72 questions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

NOVELS = [
    ("Pride and Prejudice", "Jane Austen", "Steventon", 1813),
    ("Frankenstein", "Mary Shelley", "London", 1818),
    ("Jane Eyre", "Charlotte Bronte", "Thornton", 1847),
    ("Moby-Dick", "Herman Melville", "New York City", 1851),
    ("Madame Bovary", "Gustave Flaubert", "Rouen", 1857),
    ("Great Expectations", "Charles Dickens", "Portsmouth", 1861),
    ("Crime and Punishment", "Fyodor Dostoevsky", "Moscow", 1866),
    ("War and Peace", "Leo Tolstoy", "Yasnaya Polyana", 1869),
    ("Treasure Island", "Robert Louis Stevenson", "Edinburgh", 1883),
    ("The Picture of Dorian Gray", "Oscar Wilde", "Dublin", 1891),
    ("Dracula", "Bram Stoker", "Clontarf", 1897),
    ("The War of the Worlds", "H. G. Wells", "Bromley", 1898),
    ("Buddenbrooks", "Thomas Mann", "Lübeck", 1901),
    ("The Call of the Wild", "Jack London", "San Francisco", 1903),
    ("Ulysses", "James Joyce", "Rathgar", 1922),
    ("The Trial", "Franz Kafka", "Prague", 1925),
    ("The Sun Also Rises", "Ernest Hemingway", "Oak Park", 1926),
    ("To the Lighthouse", "Virginia Woolf", "Kensington", 1927),
    ("The Sound and the Fury", "William Faulkner", "New Albany", 1929),
    ("Brave New World", "Aldous Huxley", "Godalming", 1932),
    ("The Hobbit", "J. R. R. Tolkien", "Bloemfontein", 1937),
    ("The Stranger", "Albert Camus", "Mondovi", 1942),
    ("Nineteen Eighty-Four", "George Orwell", "Motihari", 1949),
    ("Lolita", "Vladimir Nabokov", "Saint Petersburg", 1955),
]


def novel(i: int) -> list:
    title, author, _, year = NOVELS[i % len(NOVELS)]
    return [title, [f"{title} is a novel by {author}.", f" It was first published in {year}."]]


def author(i: int) -> list:
    _, name, place, _ = NOVELS[i % len(NOVELS)]
    return [name, [f"{name} was a writer.", f" The writer was born in {place}."]]


def hotpotqa() -> list[dict]:
    """72 records as in hotpot_train_v1.1.json: ten paragraphs each, two of them supporting."""
    records = []
    for i, (title, _, place, _) in enumerate(NOVELS):
        j = (i + 5) % len(NOVELS)
        first = min(i, j)
        for kind, question, answer, context in (
            ("bridge", f"Where was the author of {title} born?", place, [novel(i), author(i)]),
            ("bridge", f"Which novel was written by the writer who was born in {place}?", title, [author(i), novel(i)]),
            (
                "comparison",
                f"Which novel was published first, {title} or {NOVELS[j][0]}?",
                NOVELS[first][0],
                [novel(i), novel(j)],
            ),
        ):
            distractors = [other(i + n) for n in (7, 8, 9, 10) for other in (novel, author)]
            records.append(
                {
                    "_id": f"5a{len(records):022x}",
                    "answer": answer,
                    "question": question,
                    "supporting_facts": [[context[0][0], 0], [context[1][0], 1]],
                    "context": distractors[:3] + [context[0]] + distractors[3:] + [context[1]],
                    "type": kind,
                    "level": "medium",
                }
            )
    return records


def hub_form(record: dict) -> dict:
    """A HotpotQA record as the hub's table gives it."""
    titles, sentences = zip(*record["context"], strict=True)
    facts, places = zip(*record["supporting_facts"], strict=True)
    return {key: record[key] for key in ("question", "answer", "type", "level") if key in record} | {
        "id": record["_id"],
        "supporting_facts": {"title": list(facts), "sent_id": list(places)},
        "context": {"title": list(titles), "sentences": [list(s) for s in sentences]},
    }


def twowiki() -> list[dict]:
    """24 records as in 2WikiMultihopQA's train.json."""
    kinds = {"bridge": "compositional", "comparison": "comparison"}
    return [
        {
            "_id": record["_id"],
            "type": kinds[record["type"]],
            "question": record["question"],
            "context": record["context"],
            "supporting_facts": record["supporting_facts"],
            "evidences": [[record["supporting_facts"][0][0], "author", record["supporting_facts"][1][0]]],
            "answer": record["answer"],
        }
        for record in hotpotqa()[::3]
    ]


def musique() -> list[dict]:
    """24 records as in musique_ans_v1.0_train.jsonl."""
    records = []
    for i, (title, name, place, _) in enumerate(NOVELS):
        context = [novel(i), author(i), novel(i + 1), author(i + 2)]
        paragraphs = [
            {"idx": n, "title": head, "paragraph_text": "".join(sentences), "is_supporting": n < 2}
            for n, (head, sentences) in enumerate(context)
        ]
        decomposition = [
            {"id": 1, "question": f"{title} >> author", "answer": name, "paragraph_support_idx": 0},
            {"id": 2, "question": "#1 >> place of birth", "answer": place, "paragraph_support_idx": 1},
        ]
        records.append(
            {
                "id": f"2hop__{i}_{i + 100}",
                "paragraphs": paragraphs,
                "question": f"Where was the author of {title} born?",
                "question_decomposition": decomposition,
                "answer": place,
                "answer_aliases": [f"{place}, Earth"] if i % 2 else [],
                "answerable": True,
            }
        )
    return records


def write_json(path: Path, records: list) -> Path:
    return _write(path, json.dumps(records))


def write_jsonl(path: Path, records: list) -> Path:
    return _write(path, "".join(json.dumps(record) + "\n" for record in records))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path

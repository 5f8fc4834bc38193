"""A small library in the published formats of HotpotQA, 2WikiMultihopQA and MuSiQue (24 novels, 48
paragraphs, 72 questions), and a few problems in those of GSM8K and DAPO-Math-17k."""

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
            (
                "bridge",
                f"Which novel was written by the writer who was born in {place}?",
                title,
                [author(i), novel(i)],
            ),
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
    return {
        key: record[key] for key in ("question", "answer", "type", "level") if key in record
    } | {
        "id": record["_id"],
        "supporting_facts": {"title": list(facts), "sent_id": list(places)},
        "context": {"title": list(titles), "sentences": [list(s) for s in sentences]},
    }


def twowiki() -> list[dict]:
    """24 records as in 2WikiMultihopQA's train.json, in its second release."""
    kinds = {"bridge": "compositional", "comparison": "comparison"}
    return [
        {
            "_id": record["_id"],
            "type": kinds[record["type"]],
            "question": record["question"],
            "context": record["context"],
            "supporting_facts": record["supporting_facts"],
            "evidences": [
                [record["supporting_facts"][0][0], "author", record["supporting_facts"][1][0]]
            ],
            "answer": record["answer"],
            "entity_ids": "Q1_Q2",
            "evidences_id": [["Q1", "author", "Q2"]],
            "answer_id": f"Q{100 + i}",
        }
        for i, record in enumerate(hotpotqa()[::3])
    ]


def twowiki_aliases() -> list[dict]:
    """Lines as in id_aliases.json: of every other answer."""
    return [
        {
            "Q_id": f"Q{100 + i}",
            "aliases": [f"{record['answer']} (town)"],
            "demonyms": [f"{record['answer']}er"],
        }
        for i, record in enumerate(hotpotqa()[::3])
        if i % 2
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
            {
                "id": 2,
                "question": "#1 >> place of birth",
                "answer": place,
                "paragraph_support_idx": 1,
            },
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


def gsm8k() -> list[dict]:
    """24 records as in grade-school-math's train.jsonl and on the hub; the fifth takes one step
    only."""
    records = []
    for i in range(24):
        pens, price = 30 * i + 7, 3 + i % 5
        sold, coins = pens * price, 1000 + pens * price
        first = f"The pens bring {pens}*{price}=<<{pens}*{price}={sold}>>{sold} coins."
        second = (
            f"\nThen there are 1000+{sold}=<<1000+{sold}={coins}>>{coins:,} coins."
            if i != 4
            else ""
        )
        asked = "How many coins has she now?" if i != 4 else "How many coins do the pens bring?"
        records.append(
            {
                "question": f"Ida has 1,000 coins and sells {pens} pens for {price} coins each. "
                f"{asked}",
                "answer": f"{first}{second}\n#### {coins:,}" if i != 4 else f"{first}\n#### {sold}",
            }
        )
    return records


def dapo_math() -> list[dict]:
    """24 records as in open-r1/DAPO-Math-17k-Processed."""
    return [
        {
            "prompt": f"Find the remainder when $7^{{{i + 2}}}$ is divided by {i + 11}.",
            "solution": str(pow(7, i + 2, i + 11)),
            "data_source": "math_dapo",
            "source_prompt": [{"content": "Solve the following problem ...", "role": "user"}],
            "ability": "MATH",
            "reward_model": {
                "ground_truth": str(pow(7, i + 2, i + 11)),
                "style": "rule-lighteval/MATH_v2",
            },
            "extra_info": {"index": f"{i:08x}-0000-4000-8000-000000000000"},
        }
        for i in range(24)
    ]


def write_json(path: Path, records: list) -> Path:
    return _write(path, json.dumps(records))


def write_jsonl(path: Path, records: list) -> Path:
    return _write(path, "".join(json.dumps(record) + "\n" for record in records))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def a_step_of_maths(home: Path, model: Path, preset: str, *settings: str) -> list[str]:
    """What stands behind `agent-r1 train` for a step of the preset gsm8k or dapo-math on records in
    its published form. The run is called maths; later settings win."""
    source = write_jsonl(home / "mine.jsonl", {"gsm8k": gsm8k, "dapo-math": dapo_math}[preset]())
    small = [
        "data.train=12",
        "data.val=2",
        "data.test=4",
        f"data.source={source}",
        "data.system=Calculate.",
        "engine=local",
        "trainer.device=cpu",
        "trainer.threads=1",
        "trainer.steps=1",
        "trainer.eval_every=0",
        f"model.path={model}",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_tokens_per_turn=8",
        "rollout.max_context=512",
        "rollout.max_concurrent_episodes=8",
    ]
    return ["grpo", f"--preset={preset}", "--run=maths", *small, *settings]

"""Read WebShop's own data: its products and its goals, in their published form.

    agent-r1 train grpo --preset webshop-tiny data.name=webshop data.source=FOLDER ...

FOLDER has the three files that WebShop's `setup.sh` downloads (of 1,000 products, or of all):

    items_shuffle*.json      a list of products: asin, name, pricing, customization_options ...
    items_ins_v2*.json       asin -> attributes
    items_human_ins.json     asin -> instructions of people, with attributes and options

In: the folder. Out: a catalogue, and goals in WebShop's order. Its first 500 goals are the test
set, the next 1,000 the validation set, the others the training set.

What differs from WebShop: the limits of price are drawn with a seed. Nouns of a name are all of its
words, and colours are not reduced to a list of names. So a reward may differ by a fraction.
"""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, Asked, DataConfig, Made, Source, first_line, read_file
from agent_r1_recipes.catalogues.products import Product, Products

LARGEST_FILE = 16 << 30
"""Bytes. The file of all 1.18 million products has some 5 GB."""
TEST_GOALS = 500
VAL_GOALS = 1000
SHUFFLE_SEED = 233
"""With which WebShop orders its goals."""
WINDOW = 10
"""Results of a page, as in WebShop."""
NO_LIMIT = 1_000_000.0
"""The highest price of a goal without a limit, as in WebShop."""
NO_PRICE = 100.0
"""The price of a product without one, as in WebShop."""
MAX_CODE = 10
"""Letters of an asin; longer ones are left out, as in WebShop."""
PRICE = re.compile(r"[\d,]+(?:\.\d+)?")


@functools.cache
def load(folder: str) -> Products:
    """Read the products of a folder. Raises AgentR1Error for a missing or damaged file."""
    attributes = _read(folder, "items_ins_v2*.json", dict)
    products: dict[str, Product] = {}
    for record in _read(folder, "items_shuffle*.json", list):
        try:
            product = _product(record, attributes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _refuse_form(folder, "items_shuffle*.json", error) from None
        if product.code != "nan" and len(product.code) <= MAX_CODE:
            products.setdefault(product.code, product)  # the first one counts
    return Products(list(products.values()), WINDOW)


def _product(record: dict[str, Any], attributes: dict[str, Any]) -> Product:
    code = record["asin"]
    features = record.get("small_description") or []
    if isinstance(features, str):
        features = [features]
    return Product(
        code=code,
        name=record["name"],
        price=_price(record.get("pricing")),
        attributes=tuple(attributes.get(code, {}).get("attributes", ())),
        options=_options(record.get("customization_options")),
        query=record["query"].lower().strip(),
        category=record["product_category"],
        description=record.get("full_description") or "",
        features=tuple(features),
    )


def _price(pricing: str | None) -> float:
    """Return the price in `$12.50`, or the middle of `$10.00 to $20.00`. WebShop draws from it."""
    numbers = [float(number.replace(",", "")) for number in PRICE.findall(pricing or "")]
    if not numbers:
        return NO_PRICE
    return round(sum(numbers[:2]) / len(numbers[:2]), 2)


def _options(values_of: dict[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Return name -> values, in the spelling of WebShop's pages."""
    options = {}
    for name, values in (values_of or {}).items():
        if values is not None:
            texts = [value["value"].strip().replace("/", " | ").lower() for value in values]
            options[name.lower()] = tuple(texts)
    return options


def goals_of(folder: str, seed: int) -> list[dict[str, Any]]:
    """List all goals in WebShop's order, with limits of price that `seed` draws."""
    catalogue = load(folder)
    instructions = _read(folder, "items_human_ins.json", dict)
    rng = random.Random(f"{seed}/webshop")
    goals = []
    for code, product in catalogue.items.items():
        for entry in instructions.get(code, ()):
            try:
                if entry["instruction_attributes"]:
                    goals.append(_goal(entry, product, rng))
            except (KeyError, TypeError, AttributeError) as error:
                raise _refuse_form(folder, "items_human_ins.json", error) from None
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def _goal(entry: dict[str, Any], product: Product, rng: random.Random) -> dict[str, Any]:
    text = entry["instruction"].strip(".")
    limits = [float(limit) for limit in range(10, 1000, 10) if limit > product.price][:4]
    highest = NO_LIMIT
    if len(limits) >= 2:
        highest = max(rng.sample(limits, 2))
        text += f", and price lower than {highest:.2f} dollars"
    options = entry["instruction_options"]
    if isinstance(options, dict):
        options = list(options.values())
    return {
        "code": product.code,
        "text": text,
        "attributes": list(entry["instruction_attributes"]),
        "options": [str(option) for option in options],
        "highest": highest,
    }


class WebShop(Source):
    """WebShop's goals as questions."""

    ability = "environment"

    def make(self, config: DataConfig, seed: int) -> Made:
        folder = str(Path(config.source or "").absolute())
        goals = goals_of(folder, seed)
        parts = {
            "test": goals[:TEST_GOALS],
            "val": goals[TEST_GOALS : TEST_GOALS + VAL_GOALS],
            "train": goals[TEST_GOALS + VAL_GOALS :],
        }
        splits = {}
        sizes = {}
        for split in self.splits:
            count = getattr(config, split) or len(parts[split])
            if len(parts[split]) < max(count, 1):
                raise AgentR1Error(
                    f"{folder} has {len(goals)} goals, of which {len(parts[split])} are for "
                    f"{split}, and data.{split}={count}; lower it, or take the files of all "
                    "products",
                    code="too_few_questions",
                )
            splits[split] = [self._question_of(goal, folder) for goal in parts[split][:count]]
            sizes[split] = {"questions": count, "kinds": {}}
        return Made(splits, [], {"sources": {}, "skipped": [], "splits": sizes})

    @staticmethod
    def _question_of(goal: dict[str, Any], folder: str) -> Asked:
        facts = {"catalogue": folder, "goal": json.dumps(goal)}
        return Asked(goal["text"], [], {"metadata": facts})


WEBSHOP = WebShop()


def _read(folder: str, pattern: str, kind: type) -> Any:
    """Read the one JSON file of that name."""
    paths = sorted(Path(folder).glob(pattern))
    if not paths:
        raise AgentR1Error(
            f"data.source={folder} has no {pattern}; give the folder of WebShop's files (its "
            "setup.sh downloads them)",
            code="missing_source",
        )
    try:
        value = json.loads(read_file(paths[0], LARGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse_form(folder, pattern, error) from None
    if not isinstance(value, kind):
        raise _refuse_form(folder, pattern, ValueError(f"it is no {kind.__name__}"))
    return value


def _refuse_form(folder: str, pattern: str, error: Exception) -> AgentR1Error:
    return AgentR1Error(
        f"{folder}, {pattern}: not in WebShop's form ({type(error).__name__}: "
        f"{first_line(error)}); download it again",
        code="damaged_file",
    )

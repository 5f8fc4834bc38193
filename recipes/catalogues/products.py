"""Make a catalogue of products, and reward a purchase as WebShop does.

A goal has attributes U_att, options U_opt and a highest price. A purchase has attributes Y_att,
options Y_opt and a price. The reward is (Yao et al. 2022, arXiv 2207.01206, section 3.1):

    r = r_type * (|U_att & Y_att| + |U_opt & Y_opt| + 1[price <= highest]) / (|U_att| + |U_opt| + 1)

    r_type = 0   if the names have no noun in common
             .1  if fewer than .1 of the goal's nouns are in the purchase's name
             .5  if at most .2 are, and neither the category nor the query is the same
             1   otherwise

In: products and goals, of `make_products` or of WebShop's files (webshop.py). Out: pages and a
reward. Next: `pages.py` plays them.
"""

from __future__ import annotations

import functools
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agent_r1_recipes.catalogues.matching import Ranking, token_set_ratio, words_of

PRODUCTS = 2000
MATCH = 0.85
"""Two options or attributes are the same above this similarity."""
BUY = "Buy Now"
KINDS = """
lamp chair table clock vase spoon plate towel candle basket mirror pillow kettle mug shelf rug
bowl knife scarf hat jacket shirt glove boot belt bag wallet tent rope drum flute brush comb
soap broom ladder hammer kite ball puzzle
""".split()  # noqa: SIM905 - a list would be a page of quotes
ATTRIBUTES = """
soft heavy light round square wooden steel woollen quick quiet folding washable striped warm
plain strong
""".split()  # noqa: SIM905 - a list would be a page of quotes
COLOURS = ["red", "blue", "green", "black", "white", "brown", "grey", "pink"]
SIZES = ["small", "medium", "large", "huge"]
HEADS = """
Bar Bel Bor Cal Cor Dal Del Dor Fal Fen Gal Gor Hal Hel Jar Jol Kal Kor Lan Lor Mal Mer Mor Nal
Nor Pal Por Ral Ros Sal Sel Sor Tal Tor Val Ven Vor Wal Yar Zor
""".split()  # noqa: SIM905 - a list would be a page of quotes
TAILS = """
ba bo da do fa fi ga go ka ki la lo ma mi mo na ni no pa pi ra ri ro sa si so ta ti to tu va vi
vo za zi zo nix dex mar lin sun nel dur kin bal ten rus pol gar mes
""".split()  # noqa: SIM905 - a list would be a page of quotes
CHECKSUMS = {"train": (0, 1, 2), "val": (3,), "test": (4,)}
"""Split -> checksums of the products that its goals are made of, modulo 5."""
SAMPLE_OPTIONS = {"color": 3, "size": 2}
"""How many values of each option a made-up product has."""


@dataclass(frozen=True)
class Product:
    """What a page shows of a product, and what the reward compares."""

    code: str
    name: str
    price: float
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name -> values, of which a buyer chooses one."""
    query: str = ""
    """The search by which WebShop's authors found it."""
    category: str = ""
    """Its place in a shop, `Home › Lamps`."""
    description: str = ""
    features: tuple[str, ...] = ()
    nouns: frozenset[str] | None = None
    """Nouns of the name; None: all its words, because no tagger of parts of speech is here."""

    @property
    def type_words(self) -> set[str]:
        return set(words_of(self.name)) if self.nouns is None else set(self.nouns)


def type_reward(product: Product, goal: Product) -> float:
    """Return r_type: whether the purchase is the kind of thing that the goal is."""
    goal_words = goal.type_words
    share = len(goal_words & product.type_words) / len(goal_words) if goal_words else 0.2
    if share == 0:
        return 0.0
    if share < 0.1:
        return 0.1
    shelves = [{part.strip() for part in p.category.split("›")} for p in (product, goal)]
    same_category = len(shelves[0] & shelves[1]) >= 2
    if share > 0.2 or same_category or product.query == goal.query:
        return 1.0
    return 0.5


def purchase_reward(
    product: Product, chosen: dict[str, str], goal_product: Product, goal: dict[str, Any]
) -> dict[str, float]:
    """Return WebShop's reward of a purchase, in [0, 1], and its parts.

    Args:
        chosen: Name -> value of the options that the buyer chose.
        goal_product: The product that the goal was made of.
        goal: `attributes`, `options` (a list of values) and `highest`, the highest price.
    """
    text = " ".join([product.name, *product.features, product.description]).lower()
    attributes = sum(
        any(token_set_ratio(own, attribute) > MATCH for own in product.attributes)
        or attribute.lower() in text
        for attribute in goal["attributes"]
    )
    options = sum(
        any(token_set_ratio(value, option) > MATCH for value in chosen.values())
        for option in goal["options"]
    )
    price = product.price <= goal["highest"]
    parts = len(goal["attributes"]) + len(goal["options"]) + 1
    type_share = type_reward(product, goal_product)
    return {
        "reward": type_share * (attributes + options + price) / parts,
        "type": type_share,
        "attributes": attributes / max(len(goal["attributes"]), 1),
        "options": options / max(len(goal["options"]), 1),
        "price": float(price),
    }


class Products:
    """A catalogue in which one looks for a product and buys it."""

    finish = BUY
    subpages: tuple[str, ...] = ("Description", "Features")
    explains = True

    def __init__(self, products: list[Product], window: int):
        self.items = {product.code: product for product in products}
        self.window = window
        texts = {}
        for product in products:
            values = [value for choices in product.options.values() for value in choices]
            words = [product.name, *product.features, product.description, *values]
            texts[product.code] = " ".join(words)
        self.ranking = Ranking(texts)

    def line(self, code: str) -> str:
        """Write a product on a page of results."""
        product = self.items[code]
        name = product.name.removeprefix(f"{code} ")
        return f"{code} {name} ${product.price:g}"

    def page(self, code: str) -> str:
        """Write what a product's page says besides its options."""
        product = self.items[code]
        return f"{product.name}\nPrice: ${product.price:g}"

    def subpage(self, code: str, name: str) -> str:
        product = self.items[code]
        if name == "Description":
            return product.description or "none"
        return "\n".join(product.features) or "none"

    def options(self, code: str) -> dict[str, tuple[str, ...]]:
        return self.items[code].options

    def links(self, code: str) -> dict[str, str]:
        """Return no links to other products: a shop has none."""
        return {}

    def reward(
        self, goal: dict[str, Any], code: str | None, chosen: dict[str, str], kept: list[str]
    ) -> dict[str, float]:
        if code is None:
            return {"reward": 0.0}
        return purchase_reward(self.items[code], chosen, self.items[goal["code"]], goal)


# ----------------------------------------------------------------------------- the made-up products


@functools.cache
def make_products() -> Products:
    """Make the 2,000 products, always the same ones."""
    rng = random.Random("catalogues/products")
    codes = [head + tail for head in HEADS for tail in TAILS]
    rng.shuffle(codes)
    products = []
    for number, code in enumerate(codes[:PRODUCTS]):
        kind = KINDS[number % len(KINDS)]
        attributes = tuple(sorted(rng.sample(ATTRIBUTES, 2)))
        options = {
            "color": tuple(rng.sample(COLOURS, SAMPLE_OPTIONS["color"])),
            "size": tuple(rng.sample(SIZES, SAMPLE_OPTIONS["size"])),
        }
        products.append(
            Product(
                code,
                f"{code} {' '.join(attributes)} {kind}",
                float(rng.randrange(10, 100)),
                attributes,
                options,
                query=kind,
                category=f"Shop › {kind}",
                nouns=frozenset([kind]),
            )
        )
    return Products(products, window=5)


def goal_of(product: Product, colour: str, size: str) -> dict[str, Any]:
    """Make a goal that this product meets: the optimum is 1."""
    # The next multiple of ten: another product of the kind may be dearer.
    highest = (int(product.price) // 10 + 1) * 10
    return {
        "code": product.code,
        "attributes": list(product.attributes),
        "options": [colour, size],
        "highest": float(highest),
    }


def questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield `count` different goals of a split. No product is the goal of two splits."""
    catalogue = make_products()
    products = [
        product
        for code, product in catalogue.items.items()
        if zlib.crc32(code.encode()) % 5 in CHECKSUMS[split]
    ]
    words: set[str] = set()
    while len(words) < count:
        product = rng.choice(products)
        colour = rng.choice(product.options["color"])
        size = rng.choice(product.options["size"])
        goal = goal_of(product, colour, size)
        mark = json.dumps(goal)
        if mark in words:
            continue
        words.add(mark)
        text = (
            f"I need a {' '.join(product.attributes)} {product.query}, color: {colour}, "
            f"size: {size}, and price lower than {goal['highest']:g} dollars"
        )
        yield {"question": text, "metadata": {"catalogue": "products", "goal": mark}}

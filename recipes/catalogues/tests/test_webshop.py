"""WebShop's own data, on small files of the published form."""

from __future__ import annotations

import json
import random

import pytest

from agent_r1 import AgentR1Error, Asked, DataConfig
from agent_r1_recipes.catalogues import webshop
from agent_r1_recipes.catalogues.pages import Pages

PRODUCTS = [
    {
        "asin": "B01LAMP",
        "name": "Acme Desk Lamp, Dimmable - USB",
        "pricing": "$24.50",
        "category": "home",
        "query": "Desk Lamps ",
        "product_category": "Home › Lighting › Lamps",
        "full_description": "A lamp that is easy to clean.",
        "small_description": ["Eco friendly", "Warm light"],
        "customization_options": {
            "Color": [{"value": "Black/White", "image": None}, {"value": "Red ", "image": None}],
            "Size": None,
        },
        "images": ["x"],
        "seller_name": "Acme",
    },
    {
        "asin": "B02RUG",
        "name": "Borel Woollen Rug",
        "pricing": "$10.00 to $1,030.00",
        "category": "home",
        "query": "rugs",
        "product_category": "Home › Floor",
        "full_description": None,
        "small_description": "Soft",
        "customization_options": {},
        "images": ["x"],
    },
    {
        "asin": "B03FREE",
        "name": "Cinto Candle",
        "pricing": "",
        "category": "home",
        "query": "candles",
        "product_category": "Home › Candles",
        "full_description": "",
        "small_description": [],
        "customization_options": None,
        "images": ["x"],
    },
]
ATTRIBUTES = {"B01LAMP": {"attributes": ["eco friendly", "easy clean"], "instruction": None}}
INSTRUCTIONS = {
    "B01LAMP": [
        {
            "asin": "B01LAMP",
            "instruction": "i need a dimmable desk lamp that is easy to clean.",
            "instruction_attributes": ["easy clean"],
            "instruction_options": ["black | white"],
        },
        {
            "asin": "B01LAMP",
            "instruction": "skipped, as in WebShop",
            "instruction_attributes": [],
            "instruction_options": [],
        },
    ],
    "B02RUG": [
        {
            "asin": "B02RUG",
            "instruction": "find me a soft rug",
            "instruction_attributes": ["soft"],
            "instruction_options": {"color": "grey"},
        }
    ],
    "B99GONE": [{"instruction": "?", "instruction_attributes": ["x"], "instruction_options": []}],
}


@pytest.fixture
def folder(tmp_path):
    files = {
        "items_shuffle_1000.json": [*PRODUCTS, PRODUCTS[0], {**PRODUCTS[2], "asin": "B" * 11}],
        "items_ins_v2_1000.json": ATTRIBUTES,
        "items_human_ins.json": INSTRUCTIONS,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    yield str(tmp_path)
    webshop.load.cache_clear()


def test_products_are_read_as_webshop_shows_them(folder):
    items = webshop.load(folder).items
    assert list(items) == ["B01LAMP", "B02RUG", "B03FREE"]
    assert items["B01LAMP"].options == {"color": ("black | white", "red")}
    assert items["B01LAMP"].attributes == ("eco friendly", "easy clean")
    assert [item.price for item in items.values()] == [24.5, 520.0, 100.0]
    assert items["B02RUG"].features == ("Soft",)


def test_goals_have_webshops_order_and_limits(folder):
    goals = webshop.goals_of(folder, 0)
    assert webshop.goals_of(folder, 0) == goals
    order = ["B01LAMP", "B02RUG"]
    random.Random(233).shuffle(order)
    assert [goal["code"] for goal in goals] == order
    lamp = next(goal for goal in goals if goal["code"] == "B01LAMP")
    # Two of the next four tens are drawn, and the higher one is the limit.
    assert lamp["highest"] in (40.0, 50.0, 60.0)
    assert lamp["text"] == (
        "i need a dimmable desk lamp that is easy to clean, and price lower than "
        f"{lamp['highest']:.2f} dollars"
    )
    rug = next(goal for goal in goals if goal["code"] == "B02RUG")
    assert rug["options"] == ["grey"] and 540 <= rug["highest"] <= 560


def test_splits_are_webshops(folder, monkeypatch):
    monkeypatch.setattr(webshop, "TEST_GOALS", 1)
    monkeypatch.setattr(webshop, "VAL_GOALS", 0)
    goals = webshop.goals_of(folder, 0)
    with pytest.raises(AgentR1Error, match=r"2 goals, of which 0 are for val"):
        webshop.WEBSHOP.make(DataConfig(name="webshop", source=folder, val=1, train=1, test=1), 0)
    monkeypatch.setattr(webshop, "TEST_GOALS", 0)
    monkeypatch.setattr(webshop, "VAL_GOALS", 1)
    with pytest.raises(AgentR1Error, match=r"of which 0 are for test"):
        webshop.WEBSHOP.make(DataConfig(name="webshop", source=folder, val=1, train=1, test=1), 0)
    assert isinstance(webshop.WebShop._question_of(goals[0], folder), Asked)


def test_a_goal_is_played_by_the_same_class(folder):
    goal = next(goal for goal in webshop.goals_of(folder, 0) if goal["code"] == "B01LAMP")
    asked = webshop.WebShop._question_of(goal, folder)
    pages = Pages()
    pages.reset(asked.question, **asked.extra["metadata"])
    results = pages.search("dimmable desk lamp")
    assert "B01LAMP Acme Desk Lamp, Dimmable - USB $24.5" in results
    pages.click("b01lamp")
    assert "Eco friendly\nWarm light" in pages.click("Features")
    pages.click("< Prev")
    assert "easy to clean" in pages.click("description")
    pages.click("< Prev")
    pages.click("Black | White")
    pages.click("Buy Now")
    assert pages.done and pages.get_reward() == 1.0 and pages.score
    wrong = Pages()
    wrong.reset(asked.question, **asked.extra["metadata"])
    for action, argument in (("search", "rug"), ("click", "B02RUG"), ("click", "Buy Now")):
        getattr(wrong, action)(argument)
    assert wrong.get_reward() == 0.0


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("items_shuffle_1000.json", "[{", "not in WebShop's form"),
        ("items_shuffle_1000.json", "{}", "it is no list"),
        ("items_shuffle_1000.json", '[{"asin": "B1"}]', "KeyError"),
        ("items_shuffle_1000.json", "[3]", "not in WebShop's form"),
        ("items_human_ins.json", '{"B01LAMP": [{"instruction": "x"}]}', "not in WebShop's form"),
        ("items_ins_v2_1000.json", None, "has no items_ins_v2"),
    ],
)
def test_a_damaged_file_is_one_line(folder, tmp_path, name, content, says):
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(AgentR1Error, match=says) as refused:
        webshop.goals_of(folder, 0)
    assert "\n" not in str(refused.value)

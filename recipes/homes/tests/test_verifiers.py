"""Episodes for verifiers, played with a scripted API. `make long PART=homes` asks verifiers."""

from __future__ import annotations

import asyncio
import json

import pytest
from api_servers import Wrong, answer, scripted_api

from agent_r1_recipes.homes.verifiers import numbers_of, open_home
from agent_r1_recipes.support.tasks import RIGHT_ACTIONS, WORDS


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(tmp_path_factory.mktemp("home")))
        yield open_home("support", "data.train=12", "data.val=2", "data.test=2")


def expert(row):
    """Do what the policy demands, and think aloud."""
    task = row["extra_info"]["metadata"]
    order = task["order"]

    def script(request, number):
        results = [m["content"] for m in request["messages"] if m["role"] == "tool"]
        if not results:
            look = [("look_up", json.dumps({"order": order}))]
            return answer(calls=look, reasoning_content="look first")
        item, price, state = results[0].split(", ")
        action = RIGHT_ACTIONS[task["complaint"], state]
        if len(results) == 1 and action == "refund":
            words = {"order": order, "amount": int(price.split()[0])}
            return answer(calls=[("refund", json.dumps(words))])
        if len(results) == 1 and action == "replace":
            return answer(calls=[("replace", json.dumps({"order": order}))])
        return answer(f"<answer>{WORDS[action]} the {item}</answer>")

    return script


def play(home, number, script):
    with scripted_api(script) as api:
        trajectory = asyncio.run(home.play(number, api.url, "an-episode's-secret", "tiny"))
    return trajectory, api


def test_an_episode_is_scored_by_our_environment(home):
    for number in (0, 1):
        trajectory, api = play(home, number, expert(home.rows[number]))
        assert (trajectory.reward, trajectory.error) == (1.0, None)
        assert numbers_of(trajectory)["solved"] == 1.0
        assert set(api.keys) == {"Bearer an-episode's-secret"}
        assert api.asked[0]["model"] == "tiny"
        names = [tool["function"]["name"] for tool in api.asked[0]["tools"]]
        assert names == ["look_up", "refund", "replace"]
        # A turn comes back with its thought, or verifiers would begin another branch.
        assert api.asked[1]["messages"][1]["reasoning_content"] == "look first"


def test_a_wrong_answer_earns_nothing(home):
    trajectory, _ = play(home, 0, lambda *_: answer("<answer>done</answer>"))
    assert (trajectory.reward, numbers_of(trajectory)["solved"]) == (0.0, 0.0)


def test_an_api_that_refuses_is_an_error(home):
    with pytest.raises(Exception, match="refused 'tiny'"):
        play(home, 0, lambda *_: Wrong(400, b'{"error": {"message": "no such model"}}'))

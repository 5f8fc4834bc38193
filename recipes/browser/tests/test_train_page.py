"""The page has inside what it needs, allows nothing else, and its worker does what it is told."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import zlib

import pytest

from agent_r1_recipes.browser import page
from agent_r1_recipes.browser.node import module_bytes, run_node
from agent_r1_recipes.browser.tests.small_world import small_plays, small_world
from agent_r1_recipes.browser.world import read_start


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("AGENT_R1_HOME", str(home))
        header, data = small_world()
        page.write_page(home / "train.html", data, small_plays())
        yield header, data, (home / "train.html").read_text()


class Elements(html.parser.HTMLParser):
    """Each element's attributes, and the contents of script elements by id."""

    def __init__(self, text: str):
        super().__init__()
        self.found, self.scripts, self.open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open = dict(attrs).get("id", "") if tag == "script" else None

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open is not None:
            self.scripts[self.open] = self.scripts.get(self.open, "") + data


def test_the_policy_allows_the_script_the_module_and_the_worker_only(small):
    elements = Elements(small[2])
    [policy] = [a["content"] for t, a in elements.found if a.get("http-equiv")]
    assert re.fullmatch(
        r"default-src 'none'; style-src 'unsafe-inline'; "
        r"script-src 'sha256-[\w+/]{43}=' 'wasm-unsafe-eval'; worker-src blob:",
        policy,
    )
    for tag, attributes in elements.found:
        assert not {"src", "href", "action", "srcset"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert "http:" not in small[2].replace("http://www.w3.org/2000/svg", "")


def test_the_recorded_staircase_is_the_canonical_runs():
    facts = json.loads((page.HERE.parents[1] / "docs/lab/canonical.json").read_text())
    curves = {0: facts["before"]["hops"], **facts["validation"]}
    kinds = ("1-hop", "2-hop", "3-hop")
    expected = [[int(step), [hops[kind] for kind in kinds]] for step, hops in curves.items()]
    assert page.recorded()["validation"] == expected


def test_everything_is_inside_and_small(small):
    elements = Elements(small[2])
    assert base64.b64decode(elements.scripts["module"]) == module_bytes()
    assert base64.b64decode(elements.scripts["data"]) == small[1]
    assert elements.scripts["worker"].startswith(page.learning_script())
    assert len(small[2]) < 5e6
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'byId\("([\w-]+)"\)', page.own_script("train_page")))
    assert used <= set(ids)


SMOOTH = "tell([0, 1, 2].map((kind) => smoothed(job.steps, kind)));"


def test_the_curve_leaves_out_a_kind_that_no_question_has():
    found = re.search(r"function smoothed\(.*?\n}\n", page.own_script("train_page"), re.S)
    assert found
    steps = [[None, 0, 1], [1, 0.5, None], [0, 1, 0]]
    [curves] = run_node(f"const SMOOTHED = 2; {found[0]} {SMOOTH}", {"steps": steps})
    assert curves == [[[2, 1], [3, 0.5]], [[1, 0], [2, 0.25], [3, 0.75]], [[1, 1], [2, 1], [3, 0]]]


@pytest.mark.parametrize("block", ["x</script>", "<!-- x", "</SCRIPT "])
def test_a_block_that_ends_its_element_is_refused(tmp_path, block):
    with pytest.raises(ValueError, match="would end its script element"):
        page.write_html(tmp_path / "x", page.HERE / "train.html", "", {}, {"WORKER": block})


HOST = """
const sent = [];
globalThis.postMessage = (message) => sent.push(message);
globalThis.onmessage = null;
"""
TALK = """
const settled = async () => {
  for (let before = -1; before !== sent.length; ) {
    before = sent.length;
    await busy;
    await nextTask();
  }
  return sent.splice(0);
};
const say = (...messages) => {
  for (const data of messages) onmessage({ data });
  return settled();
};
const kinds = (messages) => messages.map(({ type }) => type).filter((type) => type !== "live");
const asked = { type: "ask", question: "Who wrote Sosnum?", answers: [] };
const opened = await say({ type: "open", data: job.world, module: bytesOf(job.module) });
tell(kinds(opened));
const run = { type: "train", steps: 2, seed: 1, switches: [] };
const whole = await say(run);
tell(kinds(whole));
const hashes = whole.filter(({ type }) => type === "step").map(({ hash }) => hash);
tell(hashes);
const group = whole.find(({ type }) => type === "step").group;
tell(group.map(({ advantage, rows: [row] }) => ({ advantage, ...row })));
// Stop at once, take one step, ask, and go on: no step is lost, and the weights are the same.
const parts = await say(run, { type: "pause" }, asked);
parts.push(...(await say({ type: "step" }, asked)));
parts.push(...(await say({ type: "resume" })), ...(await say({ type: "evaluate", count: 8 })));
tell(kinds(parts));
tell(parts.filter(({ type }) => type === "step").map(({ hash }) => hash));
const answers = parts.filter(({ type }) => type === "answer");
tell(answers.map(({ record }) => record.rows[0].tokens.join("")));
// A run that is done goes on, as the page's button does.
const { state } = whole.findLast(({ type }) => type === "step");
const more = await say({ ...run, steps: 3, state });
tell(more.filter(({ type }) => type !== "live").map(({ type, step }) => [type, step ?? null]));
tell(await say({ type: "open", data: "no data", module: new Uint8Array(4) }));
"""


@pytest.fixture(scope="module")
def talk(small):
    program = HOST + page.own_script("worker").replace('"use strict";', "") + TALK
    world = base64.b64encode(small[1]).decode()
    return run_node(program, {"world": world})


def test_the_worker_trains_step_by_step(talk):
    opened, whole, hashes, group, *_ = talk
    assert opened[-1] == "ready" and set(opened[:-1]) == {"stage"}
    assert whole == ["step", "step", "done"]
    assert len(set(hashes)) == 2
    assert len(group) == 8 and len({row["advantage"] for row in group}) > 1
    for row in group:
        lengths = {len(row[name]) for name in ("tokens", "input_ids", "action_mask", "logprobs")}
        assert len(lengths) == 1
        assert row["step_ids"][row["action_mask"].index(1)] == 0
        last = len(row["action_mask"]) - 1 - row["action_mask"][::-1].index(1)
        assert sum(row["rewards"]) == row["rewards"][last]


def test_pause_step_ask_and_continue_lose_no_step_and_change_no_bit(talk):
    _, _, hashes, _, kinds, again, answers, *_ = talk
    assert kinds.count("step") == 2 and kinds.count("answer") == 2
    assert kinds.index("paused") < kinds.index("step")
    assert kinds[-2:] == ["done", "evaluated"]
    assert again == hashes
    assert all("Sosnum" in answer for answer in answers)


def test_a_run_that_is_done_can_go_on(talk):
    assert talk[7] == [["step", 3], ["done", None]]


def test_what_goes_wrong_is_one_sentence(talk):
    *_, last = talk[-1]
    assert last["type"] == "problem" and "\n" not in last["text"] and json.dumps(last)


REFUSED = """
WebAssembly.instantiate = () => Promise.reject(new (job.range ? RangeError : TypeError)("x"));
onmessage({ data: { type: "open", data: job.world, module: new Uint8Array(4) } });
onmessage({ data: { type: "helper", port: {} } }); // the page lets its helpers in at once
await busy;
tell(sent.filter(({ type }) => type === "problem").map(({ text, opened }) => [text, opened]));
"""


@pytest.mark.parametrize(("range_error", "cause"), [(True, "memory"), (False, "SIMD")])
def test_a_worker_that_cannot_open_says_why_and_nothing_else(small, range_error, cause):
    program = HOST + page.own_script("worker").replace('"use strict";', "") + REFUSED
    job = {"world": base64.b64encode(small[1]).decode(), "range": range_error}
    [[[text, opened]]] = run_node(program, job)
    assert cause in text and not opened


def test_the_page_in_docs_is_what_the_command_writes(small, tmp_path):
    """All but the world: its data are made in seconds, and its weights are compared here."""
    kept = (page.HERE.parents[1] / "docs/train.html").read_text()
    here, there = Elements(small[2]), Elements(kept)
    assert len(kept) < 5e6
    for name in ("module", "worker", "recorded", ""):
        assert there.scripts[name] == here.scripts[name], "agent-r1 train-page docs/train.html"
    world = zlib.decompress(base64.b64decode(there.scripts["data"]))
    weights = b"".join(read_start().sections())
    assert world.endswith(weights)

    def without_data(text):
        """Links to the lessons are in a checkout's page only."""
        return re.sub(r'id="(data|plays)">[^<]*<|</?a\b[^>]*>', "", text)

    assert without_data(kept) == without_data(small[2]), "agent-r1 train-page docs/train.html"

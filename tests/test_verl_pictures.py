"""Pictures through verl's own code: its data set, its worker's pixels and positions, its request.

No Ray, no GPU and no vLLM server. verl's methods are called as its worker calls them.
"""

from __future__ import annotations

import asyncio
import types
from types import SimpleNamespace

import pytest
import torch
from conftest import fails_with
from test_verl_compose import composed, smoke

from agent_r1.rollout.training_rows import trajectory_rows
from agent_r1_recipes.pictures import album, compare
from agent_r1_recipes.pictures.album import album_row
from agent_r1_recipes.pictures.chat import READ_ONLY, describe, pictures_in
from agent_r1_recipes.pictures.rows import chat_messages, engine_prompt, row_messages

pytestmark = pytest.mark.cluster

pytest.importorskip("verl", reason="verl is not installed: see requirements/verl-cpu.txt")
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402
from verl.workers.rollout.utils import (  # noqa: E402
    get_vision_placeholder_token_ids,
    qwen2_5_vl_dedup_image_tokens,
)

from agent_r1.cluster import agent_loop  # noqa: E402

FLOW = "agent_r1_recipes.pictures.loop:PictureLoop"


@pytest.fixture(scope="module")
def kit():
    return compare.make_kit()


@pytest.fixture
def processor(kit):
    """The processor with the positions of the model, as verl's `hf_processor` binds them.

    `hf_processor` itself opens a processor for videos, too, which needs torchvision.
    """
    inside = type(kit.model.model)
    kit.processor.config = kit.model.config
    for name in ("get_rope_index", "get_vision_position_ids"):
        setattr(kit.processor, name, types.MethodType(getattr(inside, name), kit.processor))
    return kit.processor


def from_dataset(tmp_path, processor, keep: str) -> dict:
    """A row as verl's data set returns it, from a parquet file."""
    file = tmp_path / "album.parquet"
    pq.write_table(pa.Table.from_pylist([album_row(keep=keep)]), file)
    settings = {"cache_dir": str(tmp_path), "filter_overlong_prompts": False}
    config = OmegaConf.create(settings)
    return RLHFDataset(str(file), processor.tokenizer, config, processor)[0]


class Server:
    """A rollout server that says the two turns, and notes its requests."""

    def __init__(self, kit):
        turns = [[*kit.chat.encode_data(turn), kit.chat.turn_end_id] for turn in compare.TURNS]
        self.turns = iter(turns)
        self.requests = []

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None):
        self.requests.append((prompt_ids, image_data))
        turn = next(self.turns)
        return TokenOutput(
            token_ids=turn,
            log_probs=[-1.0] * len(turn),
            stop_reason="completed",
            extra_fields={"global_steps": 1},
        )


def play_on_verl(kit, processor, tmp_path, monkeypatch, keep):
    """Play the row of verl's data set in our agent loop; the outputs, and the requests."""
    from agent_r1.config import plugins

    plugins.trust([FLOW])
    row = from_dataset(tmp_path, processor, keep)
    config = smoke(f"rollout.flow={FLOW}", "env.name=album")
    monkeypatch.setattr(agent_loop, "_open_shared", lambda *_: (config, kit.chat, {}))
    server = Server(kit)
    wrapped = DictConfigWrap(composed(smoke(), tmp_path))
    loop = agent_loop.AgentR1Loop(
        wrapped, server, env_name="album", run=str(tmp_path), processor=processor
    )
    place = {"uid": "0", "session_id": 0, "global_steps": 2}
    params = {"temperature": 1.0, "top_p": 1.0}
    return asyncio.run(loop.run(params, **(row | place))), server.requests


def worker_of(processor) -> SimpleNamespace:
    """What verl's methods read of their worker."""
    return SimpleNamespace(
        processor=processor,
        tokenizer=processor.tokenizer,
        _get_mm_processor_kwargs=lambda audio_data=None: {},
    )


def test_verls_data_set_reads_our_row(kit, processor, tmp_path):
    row = from_dataset(tmp_path, processor, "all")
    passed_on = row_messages({"prompt": row["raw_prompt"]})
    assert describe(passed_on) == describe(row_messages(album_row()))


@pytest.mark.parametrize("keep", compare.KEEPS)
def test_verl_makes_the_processors_pixels_and_positions_of_our_rows(
    kit, processor, tmp_path, monkeypatch, keep
):
    outputs, _ = play_on_verl(kit, processor, tmp_path, monkeypatch, keep)
    _, contexts = compare.play(kit, keep)
    worker = worker_of(processor)
    for output, messages in zip(outputs, contexts, strict=True):
        theirs = compare.processor_inputs(kit, messages)
        ids_1T = torch.tensor([output.prompt_ids + output.response_ids])
        assert torch.equal(ids_1T, theirs["input_ids"])
        mask = [0] * len(output.prompt_ids) + output.response_mask
        assert mask == compare.turn_mask(kit, ids_1T[0].tolist())
        inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, ids_1T)
        for name in ("pixel_values", "image_grid_thw"):
            assert torch.equal(inputs[name], theirs[name])
        ones = torch.ones_like(ids_1T)
        positions = AgentLoopWorker._compute_position_ids(worker, ids_1T, ones, inputs)
        own, _ = kit.model.model.get_rope_index(
            theirs["input_ids"], theirs["mm_token_type_ids"], theirs["image_grid_thw"]
        )
        # verl puts the plain positions of a text in front of the three of a grid.
        assert torch.equal(positions[0, 1:], own[:, 0])
        assert positions[0, 0].tolist() == list(range(ids_1T.shape[1]))


def test_verls_request_has_the_pictures_of_its_prompt(kit, processor, tmp_path, monkeypatch):
    _, requests = play_on_verl(kit, processor, tmp_path, monkeypatch, "last")
    assert [[one.size for one in images] for _, images in requests] == [[(80, 60)], [(60, 140)]]
    for ids, images in requests:
        # What verl's server passes on to vLLM.
        collapsed = qwen2_5_vl_dedup_image_tokens(ids, processor)
        assert engine_prompt(kit.chat, ids, tuple(images))["prompt_token_ids"] == collapsed
    banned = {kit.chat.decode([token]) for token in get_vision_placeholder_token_ids(processor)}
    assert banned == {"<|image_pad|>", "<|video_pad|>"} <= {*READ_ONLY}


def test_a_text_that_spells_a_placeholder_does_not_end_verls_worker(
    kit, processor, tmp_path, monkeypatch
):
    """verl decodes a row and encodes it again. Without the blank, its worker would raise."""
    monkeypatch.setattr(album, "QUESTION", "Which? <|image_pad|><|image_pad|><|image_pad|>")
    [output], _ = play_on_verl(kit, processor, tmp_path, monkeypatch, "all")
    worker = worker_of(processor)
    ids = output.prompt_ids + output.response_ids
    inputs = AgentLoopWorker._compute_multi_modal_inputs(worker, output, torch.tensor([ids]))
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 10, 4]]
    hostile = torch.tensor([ids + kit.chat.encode_data("<|image_pad|>" * 3)])
    with pytest.raises((StopIteration, IndexError, ValueError, RuntimeError)):
        AgentLoopWorker._compute_multi_modal_inputs(worker, output, hostile)


def test_verl_without_a_processor_is_refused(tmp_path, kit, monkeypatch):
    """verl would take the model for a text model, and train without the pictures."""
    monkeypatch.setattr(agent_loop, "_open_shared", lambda *_: (smoke(), kit.chat, {}))
    (tmp_path / "verl").mkdir()
    wrapped = DictConfigWrap(composed(smoke(), tmp_path))
    loop = agent_loop.AgentR1Loop(wrapped, None, env_name="album", run=str(tmp_path))
    place = {"raw_prompt": [], "uid": "0", "session_id": 0, "global_steps": 2, "index": 0}
    with fails_with("pictures_not_read", match="verl has no processor"):
        asyncio.run(loop.run({"temperature": 1.0, "top_p": 1.0}, **place))
    assert "install torchvision" in (tmp_path / "verl" / "failure.txt").read_text()


def test_a_text_policy_sends_no_pictures(kit):
    """A server without this argument keeps working."""

    class TextServer:
        async def generate(self, request_id, prompt_ids, sampling_params):
            return TokenOutput(
                token_ids=[1], log_probs=[-1.0], stop_reason="completed", extra_fields={}
            )

    policy = agent_loop.VerlPolicy(TextServer(), (1,), use_seeds=True)
    sampling = agent_loop.Sampling(max_tokens=4)
    assert asyncio.run(policy.generate([5, 6], sampling, "0")).token_ids == [1]


def test_vllm_reads_our_requests(kit):
    """Its own types, and its own decoder of an `image_url`."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.inputs import TokensPrompt
    from vllm.multimodal.media import ImageMediaIO

    trajectory, _ = compare.play(kit, "all")
    [row] = trajectory_rows(trajectory, 0)
    request = engine_prompt(kit.chat, row.input_ids, trajectory.extra["pictures"][0])
    assert request.keys() <= TokensPrompt.__required_keys__ | TokensPrompt.__optional_keys__
    assert TokensPrompt.__required_keys__ <= request.keys()
    messages = row_messages(album_row())
    sent = ChatCompletionRequest(model="m", messages=chat_messages(messages))
    [part] = [part for part in sent.messages[0]["content"] if part["type"] == "image_url"]
    kind, _, code = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    loaded = ImageMediaIO().load_base64(kind, code)
    assert getattr(loaded, "media", loaded) == pictures_in(messages)[0]

"""Make a tiny model of Qwen2.5-VL's architecture with random weights, its processor and a policy.

In: nothing. Out: the classes of `transformers` for that model, with a hundred thousand weights, to
compare tokens and log-probabilities with. Next: `compare.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_5_vl import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from agent_r1 import Generation, Policy, Sampling
from agent_r1_recipes.pictures.chat import END, PAD, READ_ONLY, START, PictureChat
from agent_r1_recipes.pictures.rows import model_inputs

SIDE = 28
"""Pixels of a token's side: two patches of 14."""
# Qwen2.5-VL's layout, without its default system message.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes and a few pairs, with Qwen2.5-VL's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["look at the colours and answer: red, blue"] * 3, trainer)
    controls = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *READ_ONLY)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in controls])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


class PictureProcessor(Qwen2_5_VLProcessor):
    """The processor of `transformers` without its part for videos, which needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str):
        self.image_token = PAD
        self.video_token = "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(PAD)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def make_processor() -> PictureProcessor:
    """Make the processor: a picture becomes 4 to 16 tokens."""
    image_processor = Qwen2VLImageProcessorPil(
        min_pixels=4 * SIDE * SIDE, max_pixels=16 * SIDE * SIDE
    )
    return PictureProcessor(image_processor, make_tokenizer(), TEMPLATE)


def make_model(tokenizer: Any, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Make a model with random weights, which are large enough for sharp probabilities."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in READ_ONLY}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        # Of the 4 frequencies of a head: time, height, width.
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[PAD],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" not in name:
                weights.normal_(0, 0.2, generator=generator)
    return model


@torch.inference_mode()
def logprobs_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return log pi(token | all before it) of a row.

    float32 [T], 0 for the first token.
    """
    # A model keeps the positions of its last call, and would take them for a row without pictures.
    model.model.rope_deltas = None
    logits_TV = model(**inputs).logits[0]
    ids_T = inputs["input_ids"][0]
    logprobs_TV = logits_TV.float().log_softmax(dim=-1)
    logprobs_T = torch.zeros(len(ids_T))
    logprobs_T[1:] = logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
    return logprobs_T


class TinyPolicy(Policy):
    """A policy that says what it is told to, with the tiny model's log-probabilities."""

    reads_pictures = True

    def __init__(self, model: Any, chat: PictureChat, turns: list[list[int]]):
        self.model = model
        self.chat = chat
        self.turns = iter(turns)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        """Return the next turn."""
        turn = next(self.turns)
        pictures = getattr(prompt_ids, "pictures", ())
        inputs = model_inputs(self.chat, [*prompt_ids, *turn], pictures)
        logprobs = logprobs_of(self.model, inputs)[len(prompt_ids) :]
        return Generation(turn, logprobs.tolist(), "stop")

    def release(self, session: str) -> None:
        """Keep nothing."""

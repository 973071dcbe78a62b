"""Tiny random decoders for the engine, and an engine around them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnmux.dispatch.demo.engine import Engine
from attnmux.dispatch.demo.pool import PagePool
from attnmux.dispatch.demo.request import Request
from attnmux.dispatch.demo.scheduler import Scheduler
from attnmux.dispatch.spec import Limits

os.environ["HF_HUB_OFFLINE"] = "1"

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def decoder() -> Callable[[str], Any]:
    """``decoder(name)``: a model with random weights, for ``attn_implementation="attnmux"``."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'attnmux[transformers]'")
    import attnmux

    attnmux.register_transformers()
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SHAPE),
        "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
        "gemma2": lambda: transformers.Gemma2Config(**SHAPE, sliding_window=6, query_pre_attn_scalar=20, attn_logit_softcapping=1.5),
        "llama4": lambda: transformers.Llama4TextConfig(**SHAPE, attention_chunk_size=7, intermediate_size_mlp=40, num_local_experts=2),
        "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, sliding_window=6, num_local_experts=2, num_experts_per_tok=1),
    }
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            torch.manual_seed(7)
            made[name] = model = transformers.AutoModelForCausalLM.from_config(configs[name](), experts_implementation="eager").eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.4)
        made[name].set_attn_implementation("attnmux")
        return made[name]

    return make


@pytest.fixture
def engine() -> Callable[..., Engine]:
    """``engine(model, budget=..., pages=..., page_size=...)`` whose pools hold NaN where nothing was written."""
    from attnmux.dispatch.demo.runner import ModelRunner

    def make(model: Any, *, budget: int = 8, pages: int = 64, page_size: int = 4, **steering: Any) -> Engine:
        scheduler = Scheduler(PagePool(pages, page_size), budget, max_num_seqs=8)
        limits = Limits(scheduler.max_num_seqs, budget, pages * page_size, budget)
        runner = ModelRunner(model, pages, page_size, limits, device="cpu", **steering)
        for pools in runner.pools:
            for pool in pools:
                pool.fill_(torch.nan)
        return Engine(runner, scheduler)

    return make


@pytest.fixture
def requests() -> Callable[..., list[Request]]:
    """``requests(lengths)``: random prompts."""

    def make(lengths: tuple[int, ...] = (3, 21, 1, 9, 14), new: int = 12) -> list[Request]:
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(3, 61, (n,), generator=generator).tolist() for n in lengths]
        return [Request(i, prompt, new, frozenset({2})) for i, prompt in enumerate(prompts)]

    return make

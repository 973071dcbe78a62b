"""Tiny random models, and the registered integration with a way to break it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'attnmux[transformers]'")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 5
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=1.5),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
    "llama4": lambda: transformers.Llama4TextConfig(**SHAPE, attention_chunk_size=6, intermediate_size_mlp=40, num_local_experts=2),
}


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Any]:
    """``tiny_model(name)``: a decoder with random weights, large enough for its attention to be sharp."""
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            torch.manual_seed(7)
            made[name] = model = transformers.AutoModelForCausalLM.from_config(
                CONFIGS[name](), attn_implementation="eager", experts_implementation="eager"
            ).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
        return made[name]

    return make


@pytest.fixture
def registered() -> Any:
    """What ``register_transformers`` registered."""
    import attnmux

    return attnmux.register_transformers()


@pytest.fixture
def tamper(registered: Any) -> Iterator[Callable[..., None]]:
    """``tamper(mask=..., attention=...)``: wrap the registered functions for one test, to see that a test notices."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTIONS

    before = ATTENTIONS["attnmux"], MASKS["attnmux"]

    def wrap(*, mask: Callable[..., Any] | None = None, attention: Callable[..., Any] | None = None) -> None:
        if mask is not None:
            MASKS.register("attnmux", lambda *args, **kwargs: mask(registered.mask, *args, **kwargs))
        if attention is not None:
            ATTENTIONS.register("attnmux", lambda *args, **kwargs: attention(registered.attention, *args, **kwargs))

    yield wrap
    ATTENTIONS.register("attnmux", before[0])
    MASKS.register("attnmux", before[1])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield

"""``attnmux_plan``: one packed forward over paged pools, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmux
from attnmux.dispatch.integrations.paged import PagedLayer, PagedStep

PAGE = 4
PROMPTS = ([5, 9, 11, 3, 8, 2, 7], [4, 6], [12, 13, 14, 15, 16])


def spec_of(model: Any, layer: Any, **changes: Any) -> attnmux.AttentionSpec:
    config = model.config
    spec = attnmux.AttentionSpec(config.num_attention_heads, config.num_key_value_heads, layer.self_attn.head_dim, model.dtype, page_size=PAGE)
    window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
    fields = {"scale": layer.self_attn.scaling, "sliding_window": window}
    fields |= {"softcap": getattr(config, "attn_logit_softcapping", None), "sinks": hasattr(layer.self_attn, "sinks")}
    return spec.replace(**{**fields, **changes})


def step_for(model: Any, lengths: tuple[int, ...], **changes: Any) -> PagedStep:
    """A prefill of rows in pages of a poisoned pool, no two neighbours."""
    count = [-(-n // PAGE) for n in lengths]
    pages = torch.randperm(2 * sum(count), generator=torch.Generator().manual_seed(2)).tolist()
    tables, slots = [], []
    for n, c in zip(lengths, count, strict=True):
        mine = [pages.pop() for _ in range(c)]
        tables.append(mine + [-1] * (max(count) - c))
        slots += [mine[p // PAGE] * PAGE + p % PAGE for p in range(n)]
    batch = attnmux.Batch(
        query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
    )
    layers = []
    for layer in model.model.layers:
        spec = spec_of(model, layer, **changes)
        attention = attnmux.Attention(spec, "cpu")
        pool = (2 * sum(count), PAGE, spec.num_kv_heads, spec.head_size)
        layers.append(PagedLayer(attention, attention.plan(batch), torch.full(pool, torch.nan), torch.full(pool, torch.nan)))
    return PagedStep(layers, torch.tensor(slots))


def forward(model: Any, step: PagedStep | None, **changes: Any) -> Tensor:
    positions = [p for prompt in PROMPTS for p in range(len(prompt))]
    arguments = {
        "input_ids": [[token for prompt in PROMPTS for token in prompt]],
        "position_ids": [positions],
        "use_cache": False,
        "attnmux_plan": step,
        **changes,
    }
    out: Tensor = model(**{k: torch.tensor(v) if isinstance(v, list) else v for k, v in arguments.items()}).logits[0]
    return out


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_packed_prefill_equals_eager(name: str, tiny_model: Callable[[str], Any], registered: Any) -> None:
    model = tiny_model(name)
    model.set_attn_implementation("attnmux")
    ours = forward(model, step_for(model, tuple(map(len, PROMPTS))))
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
    torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)


@pytest.fixture
def llama(tiny_model: Callable[[str], Any], registered: Any) -> Any:
    model = tiny_model("llama")
    model.set_attn_implementation("attnmux")
    return model


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"scale": 1.0}, "the spec of layer 0 in attnmux_plan is scale=1.0, wanted scale=0.35"),
        ({"softcap": 2.0}, "softcap=2.0, wanted softcap=None"),
        ({"sliding_window": 3}, "window or chunk=3, wanted window or chunk=None"),
        ({"causal": False}, "causal=False, wanted causal=True"),
        ({"sinks": True}, "sinks"),
    ],
)
def test_a_spec_that_is_not_the_models_is_refused(changes: dict[str, Any], what: str, llama: Any) -> None:
    with pytest.raises(ValueError, match=what):
        forward(llama, step_for(llama, (7, 2, 5), **changes))


def test_a_window_that_only_the_mask_knows_is_checked_too(tiny_model: Callable[[str], Any], registered: Any) -> None:
    model = tiny_model("mistral")
    model.set_attn_implementation("attnmux")
    with pytest.raises(ValueError, match="window or chunk=None, wanted window or chunk=5"):
        forward(model, step_for(model, (7, 2, 5), sliding_window=None))


def test_keys_of_a_second_cache_are_refused(llama: Any) -> None:
    import transformers

    cache = transformers.DynamicCache(config=llama.config)
    forward(llama, step_for(llama, (7, 2, 5)), cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="28 long, wanted the step's 14 tokens; pass use_cache=False"):
        forward(llama, step_for(llama, (7, 2, 5)), cache=cache, use_cache=True)


def test_a_batch_is_refused(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"a batch of 2, wanted \[1, tokens\]"):
        forward(llama, step_for(llama, (7, 2, 5)), input_ids=[[1] * 14] * 2, position_ids=[list(range(14))] * 2)


def test_too_few_layers_are_refused(llama: Any) -> None:
    step = step_for(llama, (7, 2, 5))
    with pytest.raises(ValueError, match="layer_idx of LlamaAttention is 1, wanted 0 to 0"):
        forward(llama, PagedStep(step.layers[:1], step.slot_mapping))

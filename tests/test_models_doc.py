"""docs/models.md: its blocks run, its specs find routes, and its windows and spans are those of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnmux
from attnmux import AttentionSpec
from attnmux.dispatch.batch_checks import check_batch
from attnmux.dispatch.rows import classify

DOC = Path(__file__).parents[1] / "docs" / "models.md"
REFUSED = {"deepseek_v3_absorbed"}
"""Specs that the page says no GPU kernel claims."""


def run_blocks() -> dict[str, Any]:
    names: dict[str, Any] = {}
    text = DOC.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(DOC), "exec"), names)
    return names


NAMES = run_blocks()
SPECS = {name: value for name, value in NAMES.items() if isinstance(value, AttentionSpec)}


def test_links_lead_to_sections() -> None:
    text = DOC.read_text(encoding="utf-8")
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == anchors - {"windows"}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_spec_finds_a_route(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(attnmux.NoBackendError):
            attnmux.select(SPECS[name], device="cuda:sm90")
    else:
        assert set(attnmux.select(SPECS[name], device="cuda:sm90").routes) == set(SPECS[name].row_classes)


def test_verify_rows_are_decode_rows() -> None:
    check_batch(SPECS["llama3"], NAMES["verify"], torch.device("cpu"), None, synchronise=True)
    assert classify(SPECS["llama3"], NAMES["verify"]) == ["decode", "decode"]


def visible(spec: AttentionSpec, n: int, spans: Sequence[Sequence[int]] = (), prefix: int = 0) -> Tensor:
    """bool ``[n, n]`` from docs/semantics.md, for one row whose tokens are all queries."""
    q, k = torch.arange(n)[:, None], torch.arange(n)[None]
    window = spec.sliding_window or n
    right = 0 if spec.causal else window - 1 if spec.window_right is None else spec.window_right
    near, seen = k > q - window, k <= q + right
    if spec.rswa_window is not None:
        seen = seen & ((k < prefix) | (k > q - spec.rswa_window))
    if spec.chunk is not None:
        seen = seen & (k // spec.chunk[0] >= q // spec.chunk[0] - spec.chunk[1])
    if spec.mm_prefix is None:
        return seen & near
    group = torch.full((n,), -1)
    for i, (start, end, *shared) in enumerate(spans):
        group[start:end] = shared[0] if shared else i
    same = (group[:, None] == group) & (group >= 0)
    return (seen & near) | same if spec.mm_prefix == "override_window" else (seen | same) & near


def mask_of(build: Callable[..., Any], config: Any, n: int, layer: str = "sliding_attention", **kwargs: Any) -> Tensor:
    """bool ``[n, n]`` as transformers builds it for one row without padding."""
    text = config.get_text_config()
    text._attn_implementation = "sdpa"  # boolean masks, and none at all where the layer is plainly causal
    masks = build(config=config, inputs_embeds=torch.empty(1, n, text.hidden_size), attention_mask=None, **kwargs)
    mask = masks[layer] if isinstance(masks, dict) else masks
    return torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask[0, 0]


Spans = list[tuple[int, ...]]
Case = Callable[[], tuple[Tensor, Spans]]


def decoder(config: str, n: int, layer: str = "sliding_attention", **fields: Any) -> Case:
    def case() -> tuple[Tensor, Spans]:
        transformers = pytest.importorskip("transformers")
        from transformers.masking_utils import create_masks_for_generate

        positions = torch.arange(n)[None]
        return mask_of(create_masks_for_generate, getattr(transformers, config)(**fields), n, layer, cache=None, position_ids=positions), []

    return case


def pictures(model: str, text: str, n: int, spans: Spans, argument: str, layer: str, inside: int = 1, **fields: Any) -> Case:
    """``inside``: the token type of a span; every other token has ``1 - inside``."""

    def case() -> tuple[Tensor, Spans]:
        transformers = pytest.importorskip("transformers")
        types = torch.full((1, n), 1 - inside)
        for start, end, *_ in spans:
            types[:, start:end] = inside
        config = getattr(transformers, f"{model}Config")(text_config=getattr(transformers, text)(**fields).to_dict())
        build = getattr(transformers, f"{model}ForConditionalGeneration").create_masks_for_generate
        return mask_of(build, config, n, layer, cache=None, position_ids=torch.arange(n)[None], **{argument: types}), spans

    return case


def encoder(config: str, n: int, **fields: Any) -> Case:
    def case() -> tuple[Tensor, Spans]:
        transformers = pytest.importorskip("transformers")
        from transformers.masking_utils import create_bidirectional_sliding_window_mask

        return mask_of(create_bidirectional_sliding_window_mask, getattr(transformers, config)(**fields), n), []

    return case


def embedding_gemma(n: int) -> Case:
    def case() -> tuple[Tensor, Spans]:
        transformers = pytest.importorskip("transformers")
        from transformers.masking_utils import create_sliding_window_causal_mask
        from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay

        config = transformers.Gemma3TextConfig(sliding_window=512, use_bidirectional_attention=True)
        either_way = _bidirectional_window_overlay(config.sliding_window)
        return mask_of(create_sliding_window_causal_mask, config, n, cache=None, or_mask_function=either_way), []

    return case


def t5gemma2(n: int) -> Case:
    def case() -> tuple[Tensor, Spans]:
        transformers = pytest.importorskip("transformers")
        from transformers.masking_utils import create_bidirectional_mask
        from transformers.models.t5gemma2.modeling_t5gemma2 import sliding_window_mask_function

        window = sliding_window_mask_function(512, is_causal=False)
        return mask_of(create_bidirectional_mask, transformers.BertConfig(), n, and_mask_function=window), []

    return case


TWO: Spans = [(5, 1100), (1110, 1130)]
VISION = {"sliding_window": 1024, "use_bidirectional_attention": "vision"}
CASES: dict[str, Case] = {
    "mistral": decoder("MistralConfig", 4100, sliding_window=4096),
    "qwen_sliding": decoder("Qwen3Config", 4100, use_sliding_window=True, sliding_window=4096),
    "gemma2_9b_sliding": decoder("Gemma2Config", 4100, sliding_window=4096),
    "gemma3_4b_sliding": decoder("Gemma3TextConfig", 1030, sliding_window=1024),
    "gpt_oss_sliding": decoder("GptOssConfig", 140),
    "llama4_rope": decoder("Llama4TextConfig", 8200, "chunked_attention"),
    "gemma3_4b_global_vision": pictures("Gemma3", "Gemma3TextConfig", 1140, TWO, "token_type_ids", "full_attention", sliding_window=1024),
    "gemma3_4b_sliding_vision": pictures("Gemma3", "Gemma3TextConfig", 1140, TWO, "token_type_ids", "sliding_attention", sliding_window=1024),
    "gemma4_26b_sliding": pictures("Gemma4", "Gemma4TextConfig", 1140, TWO, "mm_token_type_ids", "sliding_attention", **VISION),
    "gemma4_26b_global": pictures("Gemma4", "Gemma4TextConfig", 1140, TWO, "mm_token_type_ids", "full_attention", **VISION),
    "paligemma": pictures("PaliGemma", "GemmaConfig", 12, [(0, 8)], "token_type_ids", "full_attention", inside=0),
    "paligemma2_3b_global": pictures("PaliGemma", "Gemma2Config", 12, [(0, 8)], "token_type_ids", "full_attention", inside=0),
    "paligemma2_3b_sliding": pictures("PaliGemma", "Gemma2Config", 4110, [(0, 4105)], "token_type_ids", "sliding_attention", inside=0),
    "molmo2": pictures("Molmo2", "Molmo2TextConfig", 20, [(3, 8, 0), (10, 15, 0)], "mm_token_type_ids", "full_attention"),
    "embeddinggemma_sliding": embedding_gemma(300),
    "embeddinggemma2_sliding": encoder("EmbeddingGemma2TextConfig", 520, sliding_window=512),
    "modernbert_local": encoder("ModernBertConfig", 140, local_attention=128),
    "t5gemma2_encoder_sliding": t5gemma2(300),
}


@pytest.mark.parametrize("name", CASES)
def test_mask_is_that_of_transformers(name: str) -> None:
    spec = SPECS[name]
    mask, spans = CASES[name]()

    def fits(**changes: Any) -> bool:
        return torch.equal(visible(spec.replace(**changes), len(mask), spans), mask)

    assert fits()
    if spec.sliding_window is not None:
        assert not fits(sliding_window=spec.sliding_window - 1)
        assert not fits(sliding_window=spec.sliding_window + 1)
    if spans:
        others = {None, "override_window", "within_window"} - {spec.mm_prefix}
        if spec.mm_prefix and spec.sliding_window is None:
            others = {None}  # without a window the two values mean the same
        assert not any(fits(mm_prefix=other) for other in others)


def test_rswa_is_that_of_unlimited_ocr() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.unlimited_ocr.modeling_unlimited_ocr import create_reference_sliding_window_causal_mask

    prefix, generated, new = 40, 200, 5
    config = transformers.UnlimitedOcrTextConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    cache = transformers.DynamicCache(config=config)
    for tokens in (prefix, *[1] * generated):
        keys = torch.empty(1, 1, tokens, 8)
        cache.layers[0].update(keys, keys)
    mask = create_reference_sliding_window_causal_mask(config, torch.empty(1, new, config.hidden_size), None, cache)[0, 0]
    spec, length = SPECS["unlimited_ocr"], prefix + generated + new
    kept = [*range(prefix), *range(length - (mask.shape[1] - prefix), length)]  # the cache drops what lies between
    wanted = visible(spec, length, prefix=prefix)[-new:]
    assert torch.equal(wanted[:, kept], mask)
    assert int(wanted.sum()) == int(mask.sum())
    assert not torch.equal(visible(spec.replace(rswa_window=127), length, prefix=prefix)[-new:][:, kept], mask)


@pytest.mark.parametrize("heads", [12, 32, 48, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    pytest.importorskip("transformers")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(NAMES["alibi_slopes"](heads), bloom)
    torch.testing.assert_close(NAMES["mpt_slopes"](heads), -build_mpt_alibi_tensor(heads, 2)[:, 0, 0])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("mistral", "MistralConfig"),
        ("gpt_oss_full", "GptOssConfig"),
        ("llama4_nope", "Llama4TextConfig"),
        ("molmo2", "Molmo2TextConfig"),
        ("unlimited_ocr", "UnlimitedOcrTextConfig"),
        ("embeddinggemma2_global", "EmbeddingGemma2TextConfig"),
        ("embeddinggemma2_sliding", "EmbeddingGemma2TextConfig"),
        ("modernbert_global", "ModernBertConfig"),
        ("bert_base", "BertConfig"),
        ("bart_decoder", "BartConfig"),
        ("deepseek_v3", "DeepseekV3Config"),
    ],
)
def test_sizes_are_those_of_the_config(name: str, config: str) -> None:
    found = getattr(pytest.importorskip("transformers"), config)()
    if name.startswith("embeddinggemma2"):  # layer kinds differ in size
        found = found.per_layer_config[found.layer_types.index("full_attention" if name.endswith("global") else "sliding_attention")]
    heads = found.num_attention_heads
    size = getattr(found, "qk_head_dim", None) or getattr(found, "head_dim", None) or found.hidden_size // heads
    spec = SPECS[name]
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_size) == (heads, getattr(found, "num_key_value_heads", heads), size)
    assert spec.v_head_size == getattr(found, "v_head_dim", size)

"""Masks read as rows, against transformers' own dense mask of the same request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as hf

from attnmux.dispatch.integrations.masks import Layout, MaskRequest, Pattern, read_pattern


def dense(layout: Layout, request: MaskRequest) -> Tensor:
    """What attnmux's semantics make of the rows: bool ``[batch, q_length, kv_length]``."""
    fields = dict(layout.fields)
    seen = torch.zeros(request.batch_size, request.q_length, request.kv_length, dtype=torch.bool)
    taken = [0] * request.batch_size
    for row in layout.rows:
        for i in range(row.q_len):
            position = row.num_keys - row.q_len + i
            for key in range(row.num_keys):
                visible = True
                if fields["attn_type"] == "decoder":
                    visible &= key <= position
                if fields.get("sliding_window"):
                    visible &= abs(position - key) < fields["sliding_window"]
                if fields.get("chunk"):
                    size, lookback = fields["chunk"]
                    visible &= position // size - key // size <= lookback
                seen[row.owner, taken[row.owner] + i, row.first_key + key] = visible
        taken[row.owner] += row.q_len
    assert taken == [request.q_length] * request.batch_size
    return seen


@st.composite
def requests(draw: st.DrawFn) -> MaskRequest:
    """Prefill, decode and continued decoders with left or right padding, sliding and chunked layers, and encoders."""
    kind = draw(st.sampled_from(["causal", "window", "chunk", "both_ways", "window_both_ways"]))
    batch, q_length = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    q_offset = 0 if kind == "window_both_ways" else draw(st.integers(0, 9))
    total = q_offset + q_length
    size = draw(st.integers(1, 8))
    evicted = max(q_offset - size + 1, 0) if kind == "window" and draw(st.booleans()) else 0
    spare = 0 if kind == "window_both_ways" else draw(st.integers(0, 3))  # a static cache is longer than what it holds
    padding = None
    if draw(st.booleans()):
        lengths = [draw(st.integers(0, total)) for _ in range(batch)]
        left = draw(st.booleans())
        padding = torch.arange(total)[None, :] < torch.tensor(lengths)[:, None]
        padding = padding.flip(1) if left else padding
    none = torch.zeros(batch, dtype=torch.long)
    before = none if padding is None else (padding.cumsum(1) == 0).sum(1)
    functions = {
        "causal": lambda: hf.causal_mask_function,
        "window": lambda: hf.sliding_window_causal_mask_function(size),
        "chunk": lambda: hf.chunked_causal_mask_function(size, before),
        "both_ways": lambda: hf.bidirectional_mask_function,
        "window_both_ways": lambda: hf.sliding_window_bidirectional_mask_function(size),
    }
    kv_length = total - evicted + (0 if kind == "both_ways" and padding is None else spare)
    return MaskRequest(batch, q_length, kv_length, q_offset, evicted, functions[kind](), padding, size, torch.device("cpu"))


def wanted(request: MaskRequest) -> tuple[Tensor, Tensor]:
    """transformers' dense mask, and which query tokens are no padding, both without a head dimension."""
    shape = (request.batch_size, request.q_length, request.kv_length, request.q_offset, request.kv_offset)
    mask = hf.sdpa_mask(*shape, request.mask_function, request.padding, allow_is_causal_skip=False)
    positions = torch.arange(request.q_offset, request.q_offset + request.q_length)
    real = torch.ones(request.batch_size, request.q_length, dtype=torch.bool)
    if request.padding is not None and request.mask_function is not hf.bidirectional_mask_function:
        real = request.padding[:, positions]
    assert mask is not None
    return mask[:, 0], real


@settings(max_examples=250, deadline=None, derandomize=True)
@given(requests())
def test_rows_mean_what_the_dense_mask_says(request: MaskRequest) -> None:
    seen, (expected, real) = dense(request.layout(), request), wanted(request)
    assert torch.equal(seen[real], expected[real])
    assert not seen[~real].any(), "padding sees nothing"


def test_rows_are_in_an_order_that_packed_keys_accept() -> None:
    """A row's keys end before the next one's begin, whatever the padding."""
    from attnmux.dispatch.integrations.packed import packed_batch

    padding = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    layout = MaskRequest(4, 4, 4, 0, 0, hf.causal_mask_function, padding, None, torch.device("cpu")).layout()
    batch = packed_batch(layout.rows, 10, torch.device("cpu"))
    assert batch.kv_start_loc is not None
    starts = batch.kv_start_loc.tolist()
    assert starts[0] >= 0 and all(a + n <= b for a, n, b in zip(starts, batch.key_lens, starts[1:], strict=False))
    assert (batch.query_lens, batch.key_lens) == ([2, 2, 2, 2, 4, 4], [0, 2, 2, 0, 0, 4])


def test_patterns_are_read() -> None:
    window = hf.and_masks(hf.sliding_window_overlay(9), hf.sliding_window_causal_mask_function(4))
    assert read_pattern(window) == Pattern(causal=True, window=4)
    assert read_pattern(hf.sliding_window_bidirectional_mask_function(4)) == Pattern(causal=False, window=5)
    assert read_pattern(hf.bidirectional_mask_function) == Pattern(causal=False)


def request_for(mask_function: Callable[..., Any], q_length: int = 6) -> MaskRequest:
    return MaskRequest(1, q_length, q_length, 0, 0, mask_function, None, None, torch.device("cpu"))


def changed_window(sliding_window: int) -> Callable[..., Any]:
    """What transformers' overlay would look like if a release counted one key more."""

    def inner_mask(batch_idx: Tensor, head_idx: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= q_idx - sliding_window

    inner_mask.__module__, inner_mask.__qualname__ = hf.__name__, "sliding_window_overlay.<locals>.inner_mask"
    return inner_mask


def test_a_function_that_changed_its_meaning_is_noticed() -> None:
    same_name = hf.and_masks(changed_window(3), hf.causal_mask_function)
    assert read_pattern(same_name) == Pattern(causal=True, window=3)
    with pytest.raises(ValueError, match="is not what its parts"):
        request_for(same_name).layout()


@pytest.mark.parametrize(
    ("mask_function", "what"),
    [
        (hf.sliding_window_overlay(3), "only ends on the left"),
        (hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function), "or_masks of causal_mask_function and bidirectional_mask_function"),
        (hf.packed_sequence_mask_function(torch.zeros(1, 6)), "packed into one row"),
        (hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k > 0), "the mask holds .*lambda"),
    ],
)
def test_what_no_spec_expresses_is_refused_by_name(mask_function: Callable[..., Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        request_for(mask_function).layout()


def test_a_window_both_ways_over_a_cache_is_refused() -> None:
    mask_function = hf.sliding_window_bidirectional_mask_function(2)
    with pytest.raises(ValueError, match="bidirectional window over cached keys"):
        MaskRequest(1, 2, 6, 4, 0, mask_function, None, 2, torch.device("cpu")).layout()


def test_a_chunk_that_lost_its_first_keys_is_refused() -> None:
    mask_function = hf.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="chunk whose first keys have left the cache"):
        MaskRequest(1, 1, 2, 7, 6, mask_function, None, 4, torch.device("cpu")).layout()


def test_probing_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    request_for(hf.causal_mask_function).layout()
    assert torch.equal(torch.get_rng_state(), state)

"""Caches as packed keys: views where strides allow, counted copies elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnmux.dispatch.integrations.packed import packed_view, token_pitch

B, H, S, D = 3, 2, 5, 4


def head_major() -> Tensor:
    return torch.randn(B, H, S, D)


def token_major() -> Tensor:
    return torch.randn(B, S, H, D).transpose(1, 2)


def end_of_a_longer_cache() -> Tensor:
    return torch.randn(B, H, S + 4, D)[:, :, 4:]


def part_of_a_fused_projection() -> Tensor:
    return torch.randn(B, S, 3, H, D)[:, :, 1].transpose(1, 2)


def one_token() -> Tensor:
    return torch.randn(B, H, 1, D)


def one_entry() -> Tensor:
    return torch.randn(1, H, S, D)


@pytest.mark.parametrize("make", [head_major, token_major, end_of_a_longer_cache, part_of_a_fused_projection, one_token, one_entry])
def test_views_reach_every_key(make: Any) -> None:
    t = make()
    pitch = token_pitch(t)
    assert pitch is not None and pitch >= t.shape[2]
    view = packed_view(t, pitch)
    assert view.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    for b in range(t.shape[0]):
        assert torch.equal(view[b * pitch : b * pitch + t.shape[2]], t[b].transpose(0, 1))


def expanded() -> Tensor:
    return torch.randn(1, H, S, D).expand(B, H, S, D)


def strided_elements() -> Tensor:
    return torch.randn(B, H, S, 2 * D)[..., ::2]


def entries_innermost() -> Tensor:
    return torch.randn(S, B, H, D).permute(1, 2, 0, 3)


@pytest.mark.parametrize("make", [expanded, strided_elements, entries_innermost])
def test_strides_without_a_view_are_recognised(make: Any) -> None:
    assert token_pitch(make()) is None


@pytest.mark.parametrize("make_value", [head_major, expanded, entries_innermost])
def test_results_do_not_depend_on_strides(make_value: Any, registered: Any) -> None:
    """A module without a mask: what has no view, or another one than the keys, is copied and counted."""
    module = torch.nn.Module()
    module.is_causal = False
    query, key, value = torch.randn(B, 2 * H, S, D), token_major(), make_value()
    before = registered.copies.keys
    out, _ = registered.attention(module, query, key, value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out.transpose(1, 2), expected)
    assert registered.copies.keys == before + 1, "the keys were token-major already"


@pytest.mark.parametrize(("kv_length", "causal", "window", "what"), [(7, True, None, "5 queries over 7 keys"), (7, False, 3, "sliding_window=3")])
def test_without_a_mask_only_what_is_certain_runs(kv_length: int, causal: bool, window: int | None, what: str, registered: Any) -> None:
    module = torch.nn.Module()
    key = torch.randn(B, H, kv_length, D)
    with pytest.raises(ValueError, match=what):
        registered.attention(module, torch.randn(B, H, S, D), key, key, None, is_causal=causal, sliding_window=window)


def test_without_a_mask_equal_lengths_may_be_causal(registered: Any) -> None:
    module = torch.nn.Module()
    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    out, _ = registered.attention(module, q, k, v, None, is_causal=True)
    torch.testing.assert_close(out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_a_mask_of_other_sizes_is_refused(registered: Any) -> None:
    from transformers.masking_utils import causal_mask_function

    mask = registered.mask(B, S, S, mask_function=causal_mask_function)
    key = torch.randn(B, H, S + 1, D)
    with pytest.raises(ValueError, match=r"\(3, 5, 3, 5\) beside tensors of \(3, 5, 3, 6\)"):
        registered.attention(torch.nn.Module(), torch.randn(B, H, S, D), key, key, mask)


def test_queries_that_would_be_broadcast_are_refused(registered: Any) -> None:
    key = torch.randn(B, H, S, D)
    with pytest.raises(ValueError, match=r"\(1, 5, 1, 5\) beside tensors of \(1, 5, 3, 5\)"):
        registered.attention(torch.nn.Module(), torch.randn(1, H, S, D), key, key, None, is_causal=False)

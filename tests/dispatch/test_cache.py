"""Writing keys and values with plain torch: what is stored, where, and what stays as it was."""

from __future__ import annotations

import pytest
import torch

from attnmux.dispatch.cache import write_kv
from attnmux.dispatch.spec import FP8_DTYPES, AttentionSpec

SPEC = AttentionSpec(4, 2, 8, torch.float32, v_head_size=6, page_size=4)
SLOTS = torch.tensor([13, -1, 0, 7, 22])


def pools(spec: AttentionSpec) -> list[torch.Tensor]:
    """Caches full of 7, as strided views of wider tensors."""
    found = []
    for size in (spec.head_size, spec.v_head_size):
        shape = {None: (24, 2, size)}.get(spec.page_size, (6, 4, 2, size) if spec.kv_layout == "NHD" else (6, 2, 4, size))
        found.append(torch.full((*shape[:-1], size + 3), 7.0).to(spec.kv_dtype)[..., :size])
    return found


def slot(spec: AttentionSpec, cache: torch.Tensor, index: int) -> torch.Tensor:
    if spec.page_size is None:
        return cache[index].float()
    page, offset = divmod(index, spec.page_size)
    return (cache[page, offset] if spec.kv_layout == "NHD" else cache[page, :, offset]).float()


def written(spec: AttentionSpec, k_scale=None, v_scale=None, grow: float = 1.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    new = [grow * torch.randn(6, 2, size) for size in (spec.head_size, spec.v_head_size)]  # one token more than slots
    caches = pools(spec)
    write_kv(spec, *(t.to(spec.dtype) for t in new), *caches, SLOTS, k_scale, v_scale)
    return new, caches


@pytest.mark.parametrize("changes", [{}, {"kv_layout": "HND"}, {"page_size": None}, {"dtype": torch.bfloat16}], ids=str)
def test_round_trip_and_nothing_else(changes):
    spec = SPEC.replace(**changes)
    new, caches = written(spec)
    for values, cache in zip(new, caches, strict=True):
        for index in range(24):
            if index in SLOTS.tolist():
                expected = values[SLOTS.tolist().index(index)].to(spec.dtype).float()
            else:
                expected = torch.full_like(values[0], 7.0)
            assert torch.equal(slot(spec, cache, index), expected), index
        padding = cache.as_strided((*cache.shape[:-1], 3), cache.stride(), cache.shape[-1])
        assert bool((padding == 7).all())


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("layout", [{}, {"kv_layout": "HND"}, {"page_size": None}], ids=str)
def test_fp8_with_scales(dtype, layout):
    spec = SPEC.replace(kv_dtype=dtype, kv_scale="head", **layout)
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([4.0, 0.25])
    new, caches = written(spec, k_scale, v_scale)
    step = 2.0 ** -(3 if "e4m3" in str(dtype) else 2)
    for values, cache, scale in zip(new, caches, (k_scale, v_scale), strict=True):
        for i, index in enumerate(SLOTS.tolist()):
            if index >= 0:
                read = slot(spec, cache, index) * scale[:, None]
                torch.testing.assert_close(read, values[i], rtol=step / 2, atol=0.01)
        swapped = slot(spec, cache, 13) * scale.flip(0)[:, None]
        assert not torch.allclose(swapped, values[0], rtol=step / 2, atol=0.01)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_fp8_saturates(dtype):
    spec = SPEC.replace(kv_dtype=dtype, kv_scale="tensor")
    new, caches = written(spec, 1.0, torch.tensor(2.0), grow=1e7)
    largest = torch.finfo(dtype).max
    for values, cache in zip(new, caches, strict=True):
        assert torch.equal(slot(spec, cache, 13), values[0].sign() * largest)


def test_all_slots_may_be_skipped():
    caches = pools(SPEC)
    write_kv(SPEC, torch.ones(2, 2, 8), torch.ones(2, 2, 6), *caches, torch.tensor([-1, -1]), None, None)
    assert all(bool((cache == 7).all()) for cache in caches)

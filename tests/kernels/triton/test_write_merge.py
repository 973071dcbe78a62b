"""Writing into the cache and merging states, against plain torch."""

from __future__ import annotations

import math

import pytest
import torch

from attnmux.backends.triton_backend import TritonBackend
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.cache import write_kv
from attnmux.dispatch.merge import merge_states
from attnmux.dispatch.spec import FP8_DTYPES, AttentionSpec
from attnmux.kernels.triton import launch

PLAIN = AttentionSpec(4, 2, 40, torch.float16, v_head_size=24, page_size=4)
CACHES = {
    "nhd": {},
    "hnd": {"kv_layout": "HND"},
    "packed": {"page_size": None},
    "fp32": {"dtype": torch.float32},
    **{f"{str(t).removeprefix('torch.')}-{scale}": {"kv_dtype": t, "kv_scale": scale} for t in FP8_DTYPES for scale in (None, "tensor", "head")},
}


@pytest.mark.parametrize("cache", CACHES)
def test_write_kv(cache, machine, device):
    spec = PLAIN.replace(**CACHES[cache])
    pages = (12,) if spec.page_size is None else (3, 2, 4) if spec.kv_layout == "HND" else (3, 4)
    heads = () if spec.kv_layout == "HND" else (2,)
    codes = torch.randint(0, 256, (*pages, *heads, 40 + 24), dtype=torch.uint8)
    pools = [(codes if spec.kv_dtype.itemsize == 1 else codes.to(spec.kv_dtype)).view(spec.kv_dtype).to(device) for _ in range(2)]
    fused = torch.randn(7, 2, 80, dtype=torch.float32)  # keys and values out of one projection
    fused[3, 0, :5] = torch.tensor([1e4, -1e4, 1e-9, 0.0, -0.0])  # beyond every fp8 format
    fused = fused.to(spec.dtype).to(device)
    k, v = fused[..., :40], fused[..., 48:72]
    slots = torch.tensor([5, -1, 0, 11, -1, 6], device=device)
    scales = {None: None, "tensor": torch.tensor(0.37, device=device), "head": torch.tensor([0.37, 1.9], device=device)}[spec.kv_scale]
    layer = LayerArgs(k_scale=scales, v_scale=1.7 if spec.kv_scale == "tensor" else scales)
    (k_cache, v_cache), (k_want, v_want) = ((pool[..., :40], pool[..., 40:]) for pool in pools)
    write_kv(spec, k, v, k_want, v_want, slots, layer.k_scale, layer.v_scale)
    TritonBackend(spec, machine, {}).write_kv(k, v, k_cache, v_cache, slots, layer)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))
    assert not torch.equal(pools[0].view(torch.uint8).cpu().flatten(), codes.to(spec.kv_dtype).view(torch.uint8).flatten())


def test_scales_divide(machine, device):
    """A product with the reciprocal differs in the last bit, which tips values that lie on a tie."""
    spec, scale = PLAIN.replace(dtype=torch.float32, kv_dtype=torch.float8_e4m3fn, kv_scale="tensor"), torch.tensor(0.37)
    x = torch.arange(1, 2**16, dtype=torch.float32) * 2.0**-10 * scale
    x = torch.cat([x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(1e9))])
    tips = x[(x / scale).to(spec.kv_dtype).view(torch.uint8) != (x * (1 / scale)).to(spec.kv_dtype).view(torch.uint8)]
    assert len(tips) >= 20
    k = tips.repeat(4)[:80].view(1, 2, 40).to(device)
    pool = torch.zeros(3, 4, 2, 64, dtype=torch.uint8, device=device).view(spec.kv_dtype)
    layer = LayerArgs(k_scale=scale.to(device), v_scale=scale.to(device))
    TritonBackend(spec, machine, {}).write_kv(k, k[..., :24], pool[..., :40], pool[..., 40:], torch.tensor([5], device=device), layer)
    assert torch.equal(pool[1, 1, :, :40].cpu().view(torch.uint8), (k.cpu()[0] / scale).to(spec.kv_dtype).view(torch.uint8))


def test_nothing_to_write(machine, device):
    pool = torch.zeros(3, 4, 2, 40, dtype=torch.float16, device=device)
    TritonBackend(PLAIN, machine, {}).write_kv(pool[:0, 0], pool[:0, 0], pool, pool, torch.empty(0, dtype=torch.int64, device=device), LayerArgs())
    assert not bool(pool.any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("states", "tokens", "sink"), [(3, 5, False), (2, 4, True), (1, 1, False), (9, 3, True), (9, 2, False)])
def test_merge_states(states, tokens, sink, dtype, device):
    outs = torch.randn(states, tokens, 3, 24).to(dtype)
    lses = torch.randn(states, tokens, 3) * 8
    lses[:, 0, 0] = -math.inf
    lses[0, -1, 1] = -math.inf
    outs[lses == -math.inf] = math.nan
    sinks = torch.randn(3) if sink else None
    out, lse = launch.merge_states(outs.to(device), lses.to(device), None if sinks is None else sinks.to(device))
    want, want_lse = merge_states(outs.double(), lses, sinks)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        out.cpu().double(), want.double(), rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-3 if dtype == torch.float16 else 1e-5
    )
    if not sink:
        assert float(out[0, 0].abs().max()) == 0.0 and float(lse[0, 0]) == -math.inf


def test_merging_nothing(device):
    out, lse = launch.merge_states(torch.empty(2, 0, 3, 24, device=device), torch.empty(2, 0, 3, device=device))
    assert out.shape == (0, 3, 24) and lse.shape == (0, 3)

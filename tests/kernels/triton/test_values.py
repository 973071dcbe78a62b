"""Bytes and numbers: fp8 codes, scores and softmax steps against torch, in probe kernels."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from attnmux.kernels.triton.launch import FP8_FORMATS
from attnmux.kernels.triton.values import alibi_bias, decode_fp8, encode_fp8, merge_sink, merge_step, soft_cap, softmax_step

FORMATS = pytest.mark.parametrize("dtype", FP8_FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
INF = math.inf


@triton.jit
def _decode(code_ptr, out_ptr, FORMAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, decode_fp8(tl.load(code_ptr + i), FORMAT))


@triton.jit
def _encode(x_ptr, out_ptr, largest, FORMAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, encode_fp8(tl.load(x_ptr + i), largest, FORMAT))


@FORMATS
def test_every_code_is_decoded_exactly(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8)
    got = torch.empty(256, device=device)
    _decode[(1,)](codes.to(device), got, FP8_FORMATS[dtype], 256)
    want = codes.view(dtype).float()
    nan = want.isnan()
    assert torch.equal(got.cpu().isnan(), nan)
    assert torch.equal(got.cpu()[~nan].view(torch.int32), want[~nan].view(torch.int32))  # bits: -0 is not 0


@FORMATS
def test_encoding_rounds_to_nearest_even_and_saturates(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(dtype).float()
    values = values[values.isfinite()].sort().values.double()
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat([ties.float(), torch.nextafter(ties.float(), torch.tensor(INF)), torch.nextafter(ties.float(), torch.tensor(-INF))])
    special = torch.tensor([0.0, -0.0, INF, -INF, math.nan, 1e30, -1e30, 1e-30, -1e-45])
    x = torch.cat([values.float(), near, special, torch.randn(4096 - len(values) - len(near) - len(special)) * 30])
    got = torch.empty(4096, dtype=torch.uint8, device=device)
    largest = torch.finfo(dtype).max
    _encode[(1,)](x.to(device), got, largest, FP8_FORMATS[dtype], 4096)
    back, want = got.cpu().view(dtype), x.clamp(-largest, largest).to(dtype)
    assert torch.equal(back.float().isnan(), x.isnan())
    same = got.cpu() == want.view(torch.uint8)
    assert bool((same | x.isnan()).all()), x[~same & ~x.isnan()][:5]


@triton.jit
def _cap(x_ptr, out_ptr, cap, EXACT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, soft_cap(tl.load(x_ptr + i), cap, EXACT))


@pytest.mark.parametrize("cap", [0.5, 50.0, 4000.0])
@pytest.mark.parametrize("exact", [True, False])
def test_soft_cap(cap, exact, device):
    x = torch.cat([torch.linspace(-3, 3, 997) * cap, torch.linspace(-1, 1, 1000), torch.tensor([0.0, 1e-6, -1e-6, 1e30, -1e30, INF, -INF])])
    x = torch.cat([x, torch.zeros(2048 - len(x))])
    got = torch.empty(2048, device=device)
    _cap[(1,)](x.to(device), got, cap, exact, 2048)
    want = cap * torch.tanh(x.double() / cap)
    error = (got.cpu().double() - want).abs()
    assert float((error / (want.abs() + 1e-30)).max() if exact else error.max() / cap) < 4e-6


@triton.jit
def _alibi(slope_ptr, pos_ptr, out_ptr, SQRT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, key = tl.arange(0, M), tl.arange(0, N)
    bias = alibi_bias(tl.load(slope_ptr + m), tl.load(pos_ptr + m), key, SQRT)
    tl.store(out_ptr + m[:, None] * N + key[None, :], bias)


@pytest.mark.parametrize("sqrt", [False, True])
def test_alibi_bias(sqrt, device):
    slope, pos = torch.linspace(0.1, 2, 16), torch.arange(16, dtype=torch.int32) + 5
    got = torch.empty((16, 32), device=device)
    _alibi[(1,)](slope.to(device), pos.to(device), got, sqrt, 16, 32)
    distance = pos[:, None].double() - torch.arange(32)
    want = -slope[:, None].double() * (distance.clamp(min=0).sqrt() if sqrt else distance.abs())
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)


@triton.jit
def _softmax(score_ptr, out_ptr, scale, TILES: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    held = tl.zeros([M], tl.float32)  # sum of weights * key, carried as the accumulator is
    for tile in tl.static_range(TILES):
        score = tl.load(score_ptr + m[:, None] * (TILES * N) + tile * N + n[None, :])
        top, pivot, correction = softmax_step(score, scale, top)
        weights = tl.exp2(score * scale - pivot[:, None])
        total = total * correction + tl.sum(weights, axis=1)
        held = held * correction + tl.sum(weights * (tile * N + n).to(tl.float32)[None, :], axis=1)
    tl.store(out_ptr + m, top)
    tl.store(out_ptr + M + m, total)
    tl.store(out_ptr + 2 * M + m, held)


@pytest.mark.parametrize("scale", [1.0, 0.375, 1e-4])  # 0.375 of -1e4 is exact, fused with the difference or not
def test_softmax_steps_add_up(scale, device):
    score = torch.randn(16, 48) * 20
    score[0] = -INF  # sees nothing
    score[1, :40] = -INF  # starts late
    score[2, 8:] = -INF
    score[3] = -1e4
    out = torch.empty((3, 16), device=device)
    _softmax[(1,)](score.to(device), out, scale, 3, 16, 16)
    top, total, held = out.cpu().double()
    assert torch.equal(top, (score.amax(1) * scale).double())
    assert float(total[0]) == float(held[0]) == 0.0
    scaled = score[1:].double() * torch.tensor(scale).double()
    weights = torch.exp2(scaled - scaled.amax(1, keepdim=True))
    torch.testing.assert_close(total[1:], weights.sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(held[1:], (weights * torch.arange(48)).sum(1), rtol=1e-5, atol=0)


@triton.jit
def _merge(states_ptr, lses_ptr, sinks_ptr, out_ptr, states, SINK: tl.constexpr, P: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    m, d = tl.program_id(0), tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    top = tl.cast(float("-inf"), tl.float32)
    total = tl.cast(0.0, tl.float32)
    for at in range(0, states, P):
        state = at + tl.arange(0, P)
        lses = tl.load(lses_ptr + state * M + m, mask=state < states, other=float("-inf"))
        acc, top, total = merge_step(acc, top, total, tl.load(states_ptr + (state * M + m)[:, None] * D + d[None, :]), lses)
    if SINK:
        top, total, correction = merge_sink(top, total, tl.load(sinks_ptr + m))
        acc = acc * correction
    tl.store(out_ptr + m * D + d, acc / tl.where(total == 0.0, 1.0, total))
    tl.store(out_ptr + M * D + m, top + tl.log2(total))


@pytest.mark.parametrize("side_by_side", [1, 2, 8])
@pytest.mark.parametrize("sink", [False, True])
def test_merge_steps_add_up(sink, side_by_side, device):
    states, lses, sinks = torch.randn(8, 16, 16), torch.randn(8, 16) * 10, torch.randn(16)
    lses[:, 0] = -INF
    lses[:5, 1] = lses[0, 2] = lses[1:, 3] = -INF
    lses[:, 4], sinks[5] = -1e4, 40.0  # far below its sink, whose exponential is all that is left
    sinks[6] = -INF
    states[lses == -INF] = math.nan  # an empty state may hold anything
    states[5:], lses[5:] = math.nan, math.nan  # what is behind the last state is not read
    out = torch.empty(16 * 16 + 16, device=device)
    _merge[(16,)](states.to(device), lses.to(device), sinks.to(device), out, 5, sink, side_by_side, 16, 16)
    states, lses = states[:5], lses[:5]
    logits = lses.double() * math.log(2)
    values = torch.where((lses == -INF)[..., None], 0.0, states.double())
    if sink:
        logits, values = torch.cat([logits, sinks.double()[None]]), torch.cat([values, torch.zeros(1, 16, 16, dtype=torch.float64)])
    total = torch.logsumexp(logits, 0)
    weights = torch.exp(logits - torch.where(total == -INF, 0.0, total))
    torch.testing.assert_close(out[:256].view(16, 16).cpu().double(), (weights[..., None] * values).sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[256:].cpu().double() * math.log(2), total, rtol=1e-5, atol=1e-5)

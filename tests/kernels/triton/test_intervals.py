"""Which keys a token sees and which tiles are read: each device helper against plain Python, in a probe kernel."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from attnmux.kernels.masks import Sight
from attnmux.kernels.triton.intervals import own_spans, tile_bounds, tile_mask, token_intervals

KEYS = 32
SPANS = [(2, 5, -1), (7, 11, 0), (11, 14, 1), (16, 20, 0), (28, 40, -1)]
MASKS = {
    "causal": {},
    "not causal": {"causal": 0},
    "window": {"window": 6},
    "window of one": {"window": 1},
    "window both ways": {"window": 4, "causal": 0},
    "window right": {"window": 4, "window_right": 1, "causal": 0},
    "endless window": {"window": 2**31 - 1, "causal": 0},
    "chunk": {"chunk": (8, 0)},
    "chunk lookback": {"chunk": (5, 1), "window": 7},
    "endless lookback": {"chunk": (5, 2**31 - 1)},
    "causal row": {"causal": 2, "row_causal": 1, "window": 4},
    "other row": {"causal": 2, "row_causal": 0, "window": 4},
    "override": {"spans": 1},
    "override window": {"spans": 1, "window": 3},
    "override chunk": {"spans": 1, "chunk": (4, 0), "causal": 0},
    "within window": {"spans": 2, "window": 3},
    "within chunk": {"spans": 2, "chunk": (4, 0)},
    "rswa": {"rswa": 4, "prefix": 6},
    "rswa long prefix": {"rswa": 4, "prefix": 90},
}


@triton.jit
def _mask(
    pos_ptr, out_ptr, spans_ptr, num_spans, kv_len, prefix_len, row_causal, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr, SPANS: tl.constexpr, GROUPS: tl.constexpr, RSWA: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    pos = tl.load(pos_ptr + tl.arange(0, M))
    start, end, group = own_spans(pos, kv_len, spans_ptr, num_spans)
    prefix, lo, hi = token_intervals(pos, kv_len, start, end, prefix_len, row_causal != 0, CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, RSWA)
    key = tl.arange(0, N)
    mask = tile_mask(key, prefix, lo, hi, group, kv_len, spans_ptr, num_spans, SPANS, GROUPS, RSWA)
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + key[None, :], mask.to(tl.int32))


@pytest.mark.parametrize("kv_len", [30, 23, 0])
@pytest.mark.parametrize("name", MASKS)
def test_mask_is_the_definition(name, kv_len, device, ints):
    m = MASKS[name]
    window, (chunk, lookback) = m.get("window", 0), m.get("chunk", (0, 0))
    spans = SPANS if m.get("spans") else []
    pos = torch.arange(16, dtype=torch.int32) + max(kv_len - 16, 0)
    got = torch.full((16, KEYS), -1, dtype=torch.int32, device=device)
    _mask[(1,)](
        pos.to(device), got, ints(spans or [(0, 0, 0)]), len(spans), kv_len, m.get("prefix", 0), m.get("row_causal", 0), m.get("causal", 1), window,
        m.get("window_right", max(window - 1, 0)), chunk, lookback, m.get("spans", 0), bool(spans), m.get("rswa", 0), 16, KEYS,
    )  # fmt: skip
    sight = Sight(
        window=window or None,
        window_right=m.get("window_right"),
        chunk=(chunk, lookback) if chunk else None,
        mm_prefix={0: None, 1: "override_window", 2: "within_window"}[m.get("spans", 0)],
        rswa_window=m.get("rswa"),
    )
    causal = m.get("causal", 1) == 1 or bool(m.get("row_causal"))
    known = [(s, e, None if g < 0 else g) for s, e, g in spans if s < kv_len]
    want = sight.mask(pos.long()[:, None], torch.arange(KEYS)[None, :], causal, kv_len, known, m.get("prefix", 0))
    assert torch.equal(got.cpu(), want.int().expand(16, KEYS))


@triton.jit
def _tiles(inputs_ptr, out_ptr, count, BLOCK_N: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    load = inputs_ptr + i
    head, start, tiles = tile_bounds(tl.load(load), tl.load(load + SIZE), tl.load(load + 2 * SIZE), BLOCK_N)
    tl.store(out_ptr + i, head, mask=i < count)
    tl.store(out_ptr + SIZE + i, start, mask=i < count)
    tl.store(out_ptr + 2 * SIZE + i, tiles, mask=i < count)


def test_tiles_read_are_those_with_a_visible_key(device):
    cases = [(p, lo, hi) for p, lo, hi in product((0, 1, 4, 7, 8), (0, 1, 4, 5, 11), (0, 1, 4, 6, 12, 13)) if lo < hi or lo == hi == 0]
    inputs = torch.zeros((3, 256), dtype=torch.int32)
    inputs[:, : len(cases)] = torch.tensor(cases, dtype=torch.int32).T
    out = torch.empty((3, 256), dtype=torch.int32, device=device)
    _tiles[(1,)](inputs.to(device), out, len(cases), 4, 256)
    for (prefix, lo, hi), (head, start, count) in zip(cases, out.T.tolist(), strict=False):
        read = [i if i < head else start + i - head for i in range(count)]
        visible = {key // 4 for key in range(16) if key < prefix or lo <= key < hi}
        assert read == sorted(visible), (prefix, lo, hi)

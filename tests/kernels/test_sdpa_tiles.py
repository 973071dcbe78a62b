"""How rows are cut: every visible key in exactly one tile, every tile in exactly one call, scratch never too small."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.kernels.masks import Sight
from attnmux.kernels.sdpa import step, tiles
from attnmux.kernels.sdpa.tiles import Row, Shape, cut_row, group_tiles, scratch_bytes

SIGHTS = st.sampled_from(
    [
        Sight(),
        Sight(window=40),
        Sight(window=700, window_right=3),
        Sight(chunk=(64, 1)),
        Sight(rswa_window=33),
        Sight(mm_prefix="override_window"),
        Sight(mm_prefix="within_window", window=50),
        Sight(positions=False),
    ]
)


@st.composite
def shapes(draw):
    return Shape(
        num_q_heads=draw(st.sampled_from([4, 32])),
        num_kv_heads=draw(st.sampled_from([1, 4])),
        head_size=draw(st.sampled_from([3, 64, 256])),
        v_head_size=draw(st.sampled_from([3, 128])),
        page_size=draw(st.sampled_from([1, 7, 16, 48, 1056])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        alibi=draw(st.booleans()),
        native=draw(st.booleans()),
    )


@st.composite
def batches(draw):
    rows, token = [], 0
    for _ in range(draw(st.integers(1, 5))):
        kv_len = draw(st.sampled_from([0, 1, 16, 37, 200, 511, 512, 600, 3000, 5000]))
        q_len = min(kv_len, draw(st.sampled_from([0, 1, 2, 16, 17, 129, 2500]))) if kv_len else draw(st.integers(0, 2))
        spans = [(kv_len // 4, kv_len // 2, 0), (kv_len // 2, kv_len, None)] if kv_len > 4 and draw(st.booleans()) else []
        rows.append(Row(token, q_len, kv_len, draw(st.booleans()), spans, draw(st.sampled_from([0, 20, 9999]))))
        token += q_len
    return rows


@settings(max_examples=150, deadline=None, derandomize=True)
@given(shapes(), SIGHTS, batches(), st.sampled_from([1, 2, 16]))
def test_every_visible_key_is_computed_once(shape, sight, rows, threads):
    blocks = [block for i, row in enumerate(rows) for block in cut_row(i, row, sight, shape)]
    assert [b.token + b.q_len for b in blocks[:-1]] == [b.token for b in blocks[1:]]
    assert sum(b.q_len for b in blocks) == sum(row.q_len for row in rows)
    for block in blocks:
        for tile in block.tiles:
            row = rows[tile.row]
            seen = sight.seen_by_some(tile.first, tile.first + tile.q_len, row.causal, row.kv_len, row.spans, row.prefix_len)
            assert any(lo <= tile.lo < tile.hi <= hi for lo, hi in seen)
            assert tile.masked or not shape.alibi
        if block.tiles:
            assert sum(tile.keys for tile in block.tiles) == sum(hi - lo for lo, hi in seen)
            assert all(a.hi <= b.lo for a, b in pairwise(block.tiles))
    every = [tile for block in blocks for tile in block.tiles]
    calls = group_tiles(every, shape, threads)
    assert sorted((t for call in calls for t in call.tiles), key=repr) == sorted(every, key=repr)
    for call in calls:
        assert len({(t.q_len, t.dtype, t.square) for t in call.tiles}) == 1
        assert call.padded or len({(t.keys, t.lo % shape.unit) for t in call.tiles}) == 1
        units = max(-(-t.hi // shape.unit) - t.lo // shape.unit for t in call.tiles)
        needed = len(call.tiles) * units * shape.unit * shape.key_bytes(call.tiles[0].dtype)
        assert needed + 3 * tiles.ALIGNMENT <= scratch_bytes(shape, threads)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shapes(), batches())
def test_tiles_without_a_mask_are_seen_whole(shape, rows):
    for sight in (Sight(), Sight(window=40), Sight(rswa_window=33), Sight(mm_prefix="within_window", window=50)):
        for i, row in enumerate(rows):
            for tile in (t for block in cut_row(i, row, sight, shape) for t in block.tiles if not t.masked):
                q_pos, k_pos = torch.arange(tile.first, tile.first + tile.q_len)[:, None], torch.arange(tile.lo, tile.hi)[None]
                mask = sight.mask(q_pos, k_pos, row.causal, row.kv_len, row.spans, row.prefix_len)
                expected = torch.ones_like(mask).tril() if tile.square else torch.ones_like(mask)
                assert torch.equal(mask, expected)


@pytest.mark.parametrize(
    ("page_size", "heads", "size", "unit"), [(16, 8, 128, 16), (1056, 8, 128, 24), (1009, 8, 128, 1), (16, 64, 256, 1), (1, 1, 8, 1)]
)
def test_units_divide_pages_and_are_copied_in_parallel(page_size, heads, size, unit):
    assert Shape(heads, heads, size, size, page_size, torch.float32, False, False).unit == unit


def test_segments_hold_every_token_in_order(monkeypatch):
    monkeypatch.setattr(step, "PARTIAL_BYTES", 10_000)
    shape = Shape(4, 2, 8, 8, 16, torch.float32, False, False)
    rows = [Row(0, 1, 900), Row(1, 0, 5), Row(1, 40, 60), Row(41, 2, 0), Row(43, 1, 30)]
    table = torch.arange(5 * 60).view(5, 60).int()
    made = step.prepare(
        rows,
        table,
        shape=shape,
        sight=Sight(),
        alibi=None,
        kv_layout="NHD",
        scale=1.0,
        scratch=torch.empty(scratch_bytes(shape, 1), dtype=torch.uint8),
        threads=1,
        packed=False,
    )
    bounds = [(segment.lo, segment.hi) for segment in made.segments]
    assert bounds[0][0] == 0 and bounds[-1][1] == 44 and all(a[1] == b[0] for a, b in pairwise(bounds)) and len(bounds) > 1

"""Cutting work into items: plain Python, no kernel runs."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmux.kernels.triton.schedule import MIN_TILES, Reach, capacity, likely_tiles, most_tiles, schedule

REACHES = st.builds(Reach, st.none() | st.integers(1, 60), st.none() | st.integers(0, 60), st.sampled_from([0, 20, 1 << 30]))


@st.composite
def steps(draw: st.DrawFn) -> dict:
    lens = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), min_size=1, max_size=8))
    query_lens = [min(q, k) if k else q for q, k in lens]
    rows = draw(st.sets(st.integers(0, len(lens) - 1)))
    return {
        "rows": sorted(rows),
        "query_lens": query_lens,
        "kv_lens": [k for _, k in lens],
        "reach": draw(REACHES),
        "block_q": draw(st.sampled_from([1, 3, 16])),
        "block_n": draw(st.sampled_from([16, 64])),
        "kv_heads": draw(st.integers(1, 8)),
        "programs": draw(st.integers(1, 200)),
        "cut_tiles": draw(st.sampled_from([0, 0, 1, 3])),
    }


@given(steps())
def test_every_part_of_every_block_is_planned_once(step):
    made = schedule(**step)
    blocks = {(row, block) for row in step["rows"] for block in range(-(-step["query_lens"][row] // step["block_q"]))}
    parts = defaultdict(dict)
    for row, block, part, count, slot in made.items:
        assert part not in parts[row, block]
        parts[row, block][part] = (count, slot)
    assert set(parts) == blocks
    merged = {(row, block): (first, count) for row, block, first, count in made.merges}
    assert len(merged) == len(made.merges)
    slots = []
    for block, found in parts.items():
        assert {count for count, _ in found.values()} == {len(found)}
        assert sorted(found) == list(range(len(found)))
        if block in merged:
            first, count = merged[block]
            assert count == len(found)
            assert [found[part][1] for part in range(count)] == list(range(first, first + count))
            slots += range(first, first + count)
        else:
            assert [slot for _, slot in found.values()] == [-1]
    assert sorted(slots) == list(range(made.slots))


@given(steps())
def test_capacity_is_enough(step):
    made = schedule(**step)
    blocks = sum(-(-step["query_lens"][row] // step["block_q"]) for row in step["rows"])
    tiles = max((-(-k // step["block_n"]) for k in step["kv_lens"]), default=0)
    items, slots = capacity(blocks, max(tiles, 1), step["kv_heads"], step["programs"], step["cut_tiles"])
    assert len(made.items) <= items
    assert made.slots <= slots
    assert len(made.merges) <= slots


def read_tiles(first: int, last: int, kv_len: int, reach: Reach, block_n: int) -> int:
    """Tiles with a key that some token at ``[first, last]`` sees, counted one key at a time."""
    left = kv_len if reach.left is None else reach.left
    right = kv_len if reach.right is None else reach.right
    return len({k // block_n for k in range(kv_len) for q in range(first, last + 1) if (k <= q and k < reach.prefix) or q - left < k <= q + right})


@given(
    st.integers(1, 20), st.integers(0, 60), st.integers(0, 3), st.integers(1, 4), st.builds(Reach, st.none() | st.integers(1, 20), st.integers(0, 9))
)
def test_exact_lengths_are_counted_exactly(q_len, context, q_block, block_q, reach):
    kv_len = q_len + context
    first, last = context + q_block * block_q, min(context + (q_block + 1) * block_q, kv_len) - 1
    if first <= last:
        assert likely_tiles(q_len, kv_len, q_block, reach, block_q, 4) >= read_tiles(first, last, kv_len, reach, 4)
        assert likely_tiles(q_len, kv_len, q_block, Reach(reach.left), block_q, 4) - read_tiles(first, last, kv_len, Reach(reach.left), 4) <= 1


@given(st.integers(1, 6), st.integers(1, 50), st.integers(0, 50), st.integers(1, 4), REACHES)
def test_no_shorter_row_reads_more_tiles_than_the_bound(q_len, kv_len, slack, block_q, reach):
    kv_len = max(kv_len, q_len)
    for q_block in range(-(-q_len // block_q)):
        first = kv_len - q_len + q_block * block_q
        last = min(first + block_q, kv_len) - 1
        assert read_tiles(first, last, kv_len, reach, 4) <= most_tiles(q_len, kv_len + slack, q_block, reach, block_q, 4)


def test_long_rows_are_cut_and_short_ones_are_not():
    made = schedule([0, 1], [1, 1], [64 * 100, 64], Reach(), 1, 64, 2, 40, 0)
    assert sum(row == 0 for row, *_ in made.items) == 17  # 101 tiles and 2 heads over 40 programs: 6 tiles an item
    assert [item for item in made.items if item[0] == 1] == [(1, 0, 0, 1, -1)]
    assert schedule([0], [1], [64 * MIN_TILES], Reach(), 1, 64, 2, 4000, 0).merges == []


def test_long_items_come_first():
    made = schedule([0, 1, 2], [1, 1, 1], [64, 64 * 50, 64 * 3], Reach(), 1, 64, 1, 1, 0)
    assert [row for row, *_ in made.items] == [1, 2, 0]


@pytest.mark.parametrize("kv_len", [1, 5000])
def test_fixed_cuts_go_through_slots_however_short_the_row(kv_len):
    made = schedule([0], [1], [kv_len], Reach(), 1, 64, 2, 1, 32)
    assert len(made.merges) == 1
    assert made.slots == len(made.items) == -(-kv_len // (64 * 32))

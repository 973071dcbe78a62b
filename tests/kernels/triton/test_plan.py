"""The cut of a step into work items: the plan kernel against plain Python that asks of every token and every key who sees whom."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnmux.backends._triton_step import Room, room_for
from attnmux.kernels.triton import launch
from attnmux.kernels.triton.config import smallest_tile
from attnmux.kernels.triton.plan import BUCKETS, COST, FEW
from attnmux.testing import Row

MASKS = {
    "causal": {},
    "not causal": {"causal": 0},
    "per sequence": {"causal": 2},
    "window": {"window": 7},
    "window both ways": {"window": 7, "window_right": 6, "causal": 0},
    "window right": {"window": 6, "window_right": 2, "causal": 0},
    "window per sequence": {"window": 6, "window_right": 2, "causal": 2},
    "endless window": {"window": 2**31 - 1, "window_right": 2**31 - 2, "causal": 0},
    "chunk": {"chunk": 8, "lookback": 1},
    "chunk window": {"chunk": 5, "window": 9},
    "chunk not causal": {"chunk": 8, "causal": 0},
    "override": {"spans": 1},
    "override window": {"spans": 1, "window": 4},
    "override chunk": {"spans": 1, "chunk": 8},
    "within window": {"spans": 2, "window": 4},
    "within chunk": {"spans": 2, "chunk": 8},
    "rswa": {"rswa": 5},
}
ROWS = (
    Row(1, 45, prefix_len=4),
    Row(3, 18, prefix_len=90),  # longer than the row
    Row(0, 5, ((0, 3),)),
    Row(20, 34, ((3, 9), (16, 30)), prefix_len=9, causal=False),
    Row(2, 0),
    Row(9, 40, ((30, 33), (36, 90)), prefix_len=35, causal=False),  # the span and the prefix end where tokens do not
    Row(1, 70, ((60, 75), (90, 95))),
    Row(14, 15, prefix_len=12),  # tokens of the prefix
)
GROUPED = (Row(3, 58, ((2, 7, 1), (20, 25, 0), (28, 31), (50, 57, 1))), Row(12, 40, ((1, 3, 0), (10, 12, 1), (30, 33, 0), (38, 50, 1))))
ANY = (1, 2**31 - 1)


FIELDS = "row q_block begin end head_tiles start_tile full_begin full_end prefix_max lo_min hi_max first_token q_len kv_len slot parts"
Item = namedtuple("Item", FIELDS)


class Step(NamedTuple):
    rows: Sequence[Row]
    mask: dict
    block_q: int = 3
    block_n: int = 4
    least: int = 1
    programs: int = 8
    kv_heads: int = 1
    cut_tiles: int = 0
    lens: tuple[int, int] = ANY

    def room(self) -> Room:
        units = sum(-(-row.q_len // self.block_q) for row in self.rows if self.lens[0] <= row.q_len <= self.lens[1])
        tiles = max((-(-row.kv_len // self.block_n) for row in self.rows), default=0)
        return room_for(units, tiles, self.programs, self.kv_heads, self.cut_tiles)


def plan(step: Step, device: torch.device, room: Room | None = None, poison: int = 0x5A5A5A5A) -> tuple[list[Item], list[int]]:
    """Items and merges. Tables hold garbage before, and the step's tensors hold some behind its rows."""
    rows, room = step.rows, room or step.room()
    tables = {name: table.fill_(poison) for name, table in room.tables(len(rows), device).items()}
    config = replace(smallest_tile(2), block_m=step.block_q * 2, block_n=step.block_n, part=step.least)
    slots = torch.zeros(1, device=device)
    work = launch.Work(step.lens, slot_out=slots, slot_lse=slots, config=config, room=room.at_once, cut_tiles=room.cut_tiles, **tables)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([*values, 77, -5], dtype=torch.int32, device=device)

    def starts(counts: Sequence[int]) -> torch.Tensor:
        return ints([sum(counts[:i]) for i in range(len(counts) + 1)])

    spans = [(*span, -1)[:3] for row in rows for span in row.spans] if step.mask.get("spans") else []
    placed = launch.Rows(
        table=torch.zeros((len(rows), 1), dtype=torch.int32, device=device),
        prefix_lens=ints([row.prefix_len for row in rows]) if step.mask.get("rswa") else None,
        causal=torch.tensor([row.causal for row in rows], device=device) if step.mask.get("causal") == 2 else None,
        row_span_start=starts([len(row.spans) for row in rows]) if spans else None,
        row_spans=torch.tensor(spans, dtype=torch.int32, device=device) if spans else None,
        groups=any(len(span) == 3 for row in rows for span in row.spans) if spans else False,
    )
    lens = launch.Lengths(len(rows), starts([row.q_len for row in rows]), ints([row.kv_len for row in rows]))
    launch.plan(placed, lens, work, launch.Features(scale=1.0, dtype=torch.float16, page_size=16, **step.mask), 2)
    assert int(work.count) <= room.items
    return [Item(*item) for item in work.items[: int(work.count)].tolist()], work.merges.tolist()


def sees(mask: dict, row: Row, q: int, k: int) -> tuple[bool, bool]:
    """Whether a token sees a key, as one of the prefix and otherwise: one pair at a time, as the documentation words it."""
    if mask.get("rswa"):
        return k <= q and k < row.prefix_len, k <= q and q - k < mask["rswa"]
    causal = row.causal if mask.get("causal") == 2 else mask.get("causal", 1)
    window, chunk = mask.get("window"), mask.get("chunk")
    recent = (not window or q - k < window) and (not chunk or q // chunk - k // chunk <= mask.get("lookback", 0))
    ahead = k <= q if causal else not window or k - q <= mask.get("window_right", window - 1)
    spans = [(start, end, group[0] if group else -1 - i) for i, (start, end, *group) in enumerate(row.spans)] if mask.get("spans") else []
    mine = {group for start, end, group in spans if start <= q < end}
    same = any(start <= k < end and group in mine for start, end, group in spans)
    return False, (ahead or same) and recent if mask.get("spans") == 2 else (ahead and recent) or same


def check_reads(step: Step, parts: list[Item]) -> int:
    """That the parts of a Q block read what its tokens see, and know which of it needs no mask. The tiles they read."""
    row, n, first = step.rows[parts[0].row], step.block_n, parts[0]
    context, keys = row.kv_len - row.q_len, range(row.kv_len)
    tokens = range(context + first.q_block * step.block_q, context + min(row.q_len, (first.q_block + 1) * step.block_q))
    seen = {(q, k): sees(step.mask, row, q, k) for q in tokens for k in keys}
    early, late = ({k for (_, k), found in seen.items() if found[i]} for i in range(2))
    for part in parts:
        assert (part.head_tiles, part.start_tile, part.lo_min, part.hi_max) == (first.head_tiles, first.start_tile, first.lo_min, first.hi_max)
        assert (part.first_token, part.q_len, part.kv_len) == (sum(r.q_len for r in step.rows[: first.row]), row.q_len, row.kv_len)
        assert part.prefix_max == max(early, default=-1) + 1
        assert part.begin <= part.full_begin <= part.full_end <= part.end
        if not step.mask.get("window") and not step.mask.get("chunk"):
            assert part.full_begin == part.begin  # the attention kernel has no masked loop before
    if row.kv_len:
        assert (first.lo_min, first.hi_max) == (min(late), max(late) + 1)
    tiles = {k // n for k in early | late}
    if any(len(span) == 3 for span in row.spans) and step.mask.get("spans"):  # groups leave gaps, which are read
        assert tiles <= set(range(first.lo_min // n, -(-first.hi_max // n)))
        tiles = set(range(first.lo_min // n, -(-first.hi_max // n)))
    order = [i if i < first.head_tiles else first.start_tile + i - first.head_tiles for part in parts for i in range(part.begin, part.end)]
    assert order == sorted(tiles), (first, sorted(tiles))
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    whole = {i for i, tile in enumerate(order) if (tile + 1) * n <= row.kv_len and all(any(seen[q, tile * n + k]) for q in tokens for k in range(n))}
    full = {i for part in parts for i in range(part.full_begin, part.full_end)}
    assert full <= whole
    if not step.mask.get("spans") and not step.mask.get("rswa"):  # those may only be told apart roughly
        assert full == whole
    return len(order)


def longest_part(tiles: list[int], room: int, least: int) -> int:
    """Tiles of the longest part, as ``even_parts`` and ``least_part`` promise it, found by trying every length."""

    def fits(room: int, short: int) -> int:
        low = max(sum(tiles) // room, least)
        return next((p for p in range(low, max(tiles)) if sum(-(-t // p) if 2 * t > p else short for t in tiles) <= room), max(low, *tiles))

    if len(tiles) > room:
        return max(sum(tiles) // room + 1, least)
    one, two = fits(room, 0), fits(2 * room, 1)
    return two if len(tiles) * FEW.value > room and 2 * (two + COST.value) < one + COST.value else one


def parts_of(tiles: list[int], room: int, least: int) -> list[int]:
    """Parts of each unit, given the tiles of all in the order of their items."""
    longest = longest_part(tiles, room, least)
    parts = [max(1, -(-t // longest)) for t in tiles]
    if len(tiles) > room and max(tiles) <= longest:  # the last round is filled
        tail = len(tiles) % room
        parts[len(tiles) - tail :] = [max(1, min(room // tail, t // least)) for t in tiles[len(tiles) - tail :]]
    return parts


def check(step: Step, made: tuple[list[Item], list[int]], room: Room | None = None) -> dict[tuple[int, int], list[Item]]:
    """All that holds of any plan. Its units in order: their parts by row and Q block."""
    (items, merges), room = made, room or step.room()
    units = defaultdict(list)
    for item in items:
        units[item.row, item.q_block].append(item)
    meant = {i: row for i, row in enumerate(step.rows) if step.lens[0] <= row.q_len <= step.lens[1]}
    assert set(units) == {(i, block) for i, row in meant.items() for block in range(-(-row.q_len // step.block_q))}
    assert [item for parts in units.values() for item in parts] == items  # parts lie together
    tiles = [check_reads(step, parts) for parts in units.values()]

    cut = [parts for parts in units.values() if len(parts) > 1]
    assert all(item.parts == len(parts) for parts in units.values() for item in parts)
    assert [item.slot for parts in cut for item in parts] == list(range(sum(map(len, cut))))
    assert all(parts[0].slot == -1 for parts in units.values() if len(parts) == 1)
    assert sum(map(len, cut)) <= room.slots
    assert len(items) <= room.items
    assert len(merges) == room.merges
    assert merges == [items.index(parts[0]) for parts in cut] + [-1] * (room.merges - len(cut))

    if tiles and not room.cut_tiles:
        longest = longest_part(tiles, room.at_once, step.least)
        lengths = [t // max(1, -(-t // longest)) for t in tiles]
        assert [len(parts) for parts in units.values()] == parts_of(tiles, room.at_once, step.least)
        assert all(item.end - item.begin <= longest for item in items)
        width = (min(longest, max(tiles)) + 1) / BUCKETS.value
        assert all(later - min(lengths[: i + 1]) < width for i, later in enumerate(lengths))
    return units


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("name", MASKS)
def test_each_block_reads_what_its_tokens_see(name, programs, device):
    for rows in (ROWS, ROWS + GROUPED) if "spans" in MASKS[name] else (ROWS,):
        step = Step(rows, MASKS[name], programs=programs)
        units = check(step, plan(step, device))
        assert (max(map(len, units.values())) > 1) == (programs > 1)
        assert [(item.begin, item.end, item.hi_max) for item in units[4, 0]] == [(0, 0, 0)]  # a row without keys


@pytest.mark.parametrize("lens", [(1, 2), (3, 16), (17, 2**31 - 1), (4, 8)])
def test_rows_of_other_lengths_are_left_out(lens, device):
    step = Step(ROWS, {}, lens=lens)
    assert {row for row, _ in check(step, plan(step, device))} == {i for i, row in enumerate(ROWS) if lens[0] <= row.q_len <= lens[1]}


@pytest.mark.parametrize(
    ("units", "parts"), [(1, [8]), (3, [5, 5, 5]), (4, [2] * 4), (8, [1] * 8), (9, [1] * 8 + [8]), (20, [1] * 16 + [2] * 4), (16, [1] * 16)]
)
def test_equal_rows_fill_the_room(units, parts, device):
    step = Step([Row(1, 400)] * units, {})
    assert [len(found) for found in check(step, plan(step, device)).values()] == parts


def test_a_row_of_just_an_even_share_is_not_cut(device):
    step = Step([*[Row(1, 32)] * 8, Row(1, 40)], {})  # 74 tiles for 8 places: 10 each at most
    assert [len(found) for found in check(step, plan(step, device)).values()] == [1] * 8 + [8]


@pytest.mark.parametrize(("units", "keys", "parts"), [(2, 2000, 8), (5, 2000, 8), (8, 2000, 8), (9, 2000, 8), (40, 1440, 6), (40, 1500, 7)])
def test_one_long_row_is_cut_among_short_ones(units, keys, parts, device):
    step = Step([*[Row(1, 9)] * (units - 1), Row(1, keys)], {})
    made = check(step, plan(step, device))
    assert next(iter(made)) == (units - 1, 0)  # the longest first
    assert [len(found) for found in made.values()] == [parts] + [1] * (units - 1)


@pytest.mark.parametrize(("units", "keys", "parts"), [(1, 100, [4]), (1, 32, [1]), (9, 72, [1] * 8 + [2]), (9, 28, [1] * 9)])
def test_parts_too_short_to_be_worth_a_merge_are_not_cut(units, keys, parts, device):
    step = Step([Row(1, keys)] * units, {}, least=8)
    assert [len(found) for found in check(step, plan(step, device)).values()] == parts


def test_longer_rows_come_first(device):
    rows = [Row(1, keys) for keys in (10, 380, 150, 40, 390, 200, 300, 20, 100)]
    step = Step(rows, {}, programs=1)
    lengths = [step.rows[row].kv_len for row, _ in check(step, plan(step, device))]
    assert lengths == [380, 390, 300, 200, 150, 100, 10, 40, 20]  # in four buckets of a hundred keys each, in the order of rows within


def test_fixed_cuts_depend_on_the_row_alone(device):
    step = Step((*ROWS, Row(1, 300)), {"window": 60}, cut_tiles=3, programs=2)
    together = check(step, plan(step, device))
    for (row, block), parts in together.items():
        assert [part.begin for part in parts] == [3 * i for i in range(len(parts))]
        assert all(part.end - part.begin == 3 for part in parts[:-1])
        alone = step._replace(rows=[step.rows[row]], programs=200)
        cut = check(alone, plan(alone, device))[0, block]
        assert [part[1:11] for part in cut] == [part[1:11] for part in parts]
    assert sum(len(parts) > 1 for parts in together.values()) > 3


@pytest.mark.parametrize("name", ["causal", "override window", "rswa"])
def test_tables_longer_than_what_is_looked_at_at_once(name, device, monkeypatch):
    """Rows, units, items and merges in many rounds or in one, over any garbage: the same plan."""
    rows = (*(ROWS + GROUPED) * 3, *[Row(1, keys) for keys in range(300, 100, -10)])
    step = Step(rows, MASKS[name], programs=150)
    wanted = plan(step, device)
    assert len(wanted[0]) > 100 and sum(merge >= 0 for merge in wanted[1]) > 20
    for lanes, poison in ((16, -1), (16, 1), (1024, 0)):
        monkeypatch.setattr(launch, "LANES", lanes)
        assert plan(step, device, poison=poison) == wanted


@pytest.mark.parametrize("cut_tiles", [0, 2])
def test_room_for_more_than_the_step_has(cut_tiles, device):
    """Tables as the limits of an engine make them: what is not used is -1 in merges, and nothing else is read."""
    step = Step([Row(0, 9), Row(1, 90), Row(0, 0), Row(4, 30)], {}, cut_tiles=cut_tiles)
    room = room_for(50, 400, 24, 2, cut_tiles)
    check(step, plan(step, device, room), room)
    nothing = step._replace(rows=[Row(0, 9), Row(0, 0)])
    assert plan(nothing, device, room) == ([], [-1] * room.merges)


LENGTHS = st.builds(
    lambda q, context, prefix: Row(q, q + context, (), prefix, context % 3 > 0), st.integers(0, 9), st.integers(0, 60), st.integers(0, 80)
)
DECODE = st.builds(lambda keys: Row(1, keys), st.sampled_from([1, 20, 21, 90, 700]))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rows = draw(st.lists(LENGTHS, min_size=1, max_size=6) | st.lists(DECODE, min_size=1, max_size=24))
    rows = [replace(row, spans=tuple(draw(st.sampled_from([(), ((3, 9), (20, 31)), ((3, 9, 0), (25, 28, 0), (40, 44, 1))])))) for row in rows]
    shape = (draw(st.sampled_from(values)) for values in ((1, 3, 8), (4, 16), (1, 2, 8), (1, 4, 12, 40, 200), (1, 2, 5), (0, 0, 0, 3)))
    return Step(rows, draw(st.sampled_from(list(MASKS.values()))), *shape)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    tiles=st.lists(st.integers(0, 30) | st.sampled_from([0, 1, 7, 8, 200]), min_size=1, max_size=40),
    room=st.integers(1, 26),
    least=st.sampled_from([1, 8]),
)
def test_no_schedule_needs_more_room_than_there_is(tiles, room, least):
    parts = parts_of(sorted(tiles, reverse=True), room, least)
    tables = room_for(len(tiles), max(tiles), room, 1, 0)
    assert sum(parts) <= tables.items
    assert sum(n for n in parts if n > 1) <= tables.slots
    assert sum(n > 1 for n in parts) <= tables.merges


@pytest.mark.parametrize(("tiles", "room"), [([100], 8), ([60, *[1] * 7], 8), ([23] * 5, 8), ([10] * 9, 8), ([400, *[1] * 11], 8)])
def test_little_room_is_left_over(tiles, room):
    """Every table entry is a program to launch: schedules come near the bound."""
    assert room_for(len(tiles), max(tiles), room, 1, 0).items - sum(parts_of(tiles, room, 1)) <= 2


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])  # to shrink a failure takes minutes
@given(step=steps(), more=st.integers(0, 30))
def test_random_steps(step, more, device):
    room = step.room()
    check(step, plan(step, device))
    limits = room_for(room.units + more, 200 + more, step.programs, step.kv_heads, step.cut_tiles)  # no row here has more tiles
    check(step, plan(step, device, limits), limits)

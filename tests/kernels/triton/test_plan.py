"""The cut of a step into work items: the plan kernel against plain Python that asks of every token and every key who sees whom."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnmux.backends._triton_step import Room, room_for
from attnmux.kernels.triton import launch, parameters
from attnmux.kernels.triton.config import smallest_tile
from attnmux.kernels.triton.plan import CLASSES, COST, ITEM_PAGES, MERGE
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
UNSEEN = -77
"""Where the block table has no page."""
Item = namedtuple("Item", FIELDS + " pages")


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
    page: int = 2

    def room(self) -> Room:
        units = sum(-(-row.q_len // self.block_q) for row in self.rows if self.lens[0] <= row.q_len <= self.lens[1])
        tiles = max((-(-row.kv_len // self.block_n) for row in self.rows), default=0)
        return room_for(units, tiles, self.programs, self.kv_heads, self.cut_tiles)


def plan(step: Step, device: torch.device, room: Room | None = None, poison: int = 0x5A5A5A5A) -> tuple[list[Item], list[int]]:
    """Items and merges. Tables hold garbage before, and the step's tensors hold some behind its rows."""
    rows, room = step.rows, room or step.room()
    tables = {name: table.fill_(poison) for name, table in room.tables(len(rows), device).items()}
    config = replace(smallest_tile(2), block_m=step.block_q * 2, block_n=step.block_n, part=step.least, prefetch=True)
    slots = torch.zeros(1, device=device)
    work = launch.Work(step.lens, slot_out=slots, slot_lse=slots, config=config, room=room.at_once, cut_tiles=room.cut_tiles, **tables)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([*values, 77, -5], dtype=torch.int32, device=device)

    def starts(counts: Sequence[int]) -> torch.Tensor:
        return ints([sum(counts[:i]) for i in range(len(counts) + 1)])

    spans = [(*span, -1)[:3] for row in rows for span in row.spans] if step.mask.get("spans") else []
    placed = launch.Rows(
        table=torch.tensor([table_of(step, i) for i in range(len(rows))], dtype=torch.int32, device=device)[:, 3:],
        prefix_lens=ints([row.prefix_len for row in rows]) if step.mask.get("rswa") else None,
        causal=torch.tensor([row.causal for row in rows], device=device) if step.mask.get("causal") == 2 else None,
        row_span_start=starts([len(row.spans) for row in rows]) if spans else None,
        row_spans=torch.tensor(spans, dtype=torch.int32, device=device) if spans else None,
        groups=any(len(span) == 3 for row in rows for span in row.spans) if spans else False,
    )
    lens = launch.Lengths(len(rows), starts([row.q_len for row in rows]), ints([row.kv_len for row in rows]))
    launch.plan(placed, lens, work, launch.Features(scale=1.0, dtype=torch.float16, page_size=step.page, **step.mask), 2)
    items, merges = work.count.tolist()
    assert items <= room.items and merges <= room.merges
    pages = 0 if step.block_n % step.page and step.page % step.block_n else max(1, step.block_n // step.page)
    found = [Item(*item[: ITEM_PAGES.value], item[ITEM_PAGES.value :][:pages]) for item in work.items[:items].tolist()]
    return found, work.merges[:merges].tolist()


def table_of(step: Step, row: int) -> list[int]:
    """The row's pages, behind three entries of another table. The same number nowhere else."""
    columns = -(-max((each.kv_len for each in step.rows), default=0) // step.page)
    mine = -(-step.rows[row].kv_len // step.page)
    return [UNSEEN] * 3 + [1000 * row + 1 + column if column < mine else UNSEEN for column in range(columns)]


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


def equal_parts(tiles: list[int], room: int, least: int) -> tuple[int, list[list[int]]]:
    """When equal parts of each unit end, as the plan counts, and their tiles."""
    share, longest, tail = sum(tiles) // room, max(tiles), 0
    if len(tiles) <= room:
        low = max(share, least)
        part = next((p for p in range(low, longest) if sum(max(1, -(-t // p)) for t in tiles) <= room), max(low, longest))
        counts, ends = [-(-t // part) for t in tiles], part + COST.value
    else:
        part, rounds, last = max(share + 1, least), len(tiles) // room, len(tiles) % room
        counts, each = [-(-t // part) for t in tiles], room // max(last, 1)
        if longest <= part and each > 1:
            tail = last
            counts[len(tiles) - tail :] = [min(each, t // least) for t in tiles[len(tiles) - tail :]]
        ends = rounds * (longest + COST.value) + (-(-longest // each) + COST.value if last else 0)
    lengths = []
    for t, count in zip(tiles, counts, strict=True):
        step = max(1, -(-t // max(1, count)))
        lengths.append([min(step, t - at) for at in range(0, t, step)] or [0])
    return ends - (0 if longest > part or tail else MERGE.value), lengths


def even_shares(tiles: list[int], room: int, least: int) -> tuple[int, list[list[int]]]:
    """The same, cut wherever another even share of all cost is full, but not into parts of fewer than ``least``."""
    cost = COST.value
    share = max(-(-(sum(tiles) + cost * len(tiles)) // room), least + cost)
    lengths, before = [], 0
    for t in tiles:
        lines = [line - before - cost for line in range(-(-(before + 1) // share) * share, before + cost + t, share)]
        cuts = [0, *(at for at in lines if least <= at <= t - least), t]
        lengths.append([end - begin for begin, end in itertools.pairwise(cuts)])
        before += cost + t
    return share + cost, lengths


def schedule(tiles: list[int], room: int, least: int) -> list[list[int]]:
    """Tiles of the parts of each unit, given the tiles of all."""
    equal, even = equal_parts(tiles, room, least), even_shares(tiles, room, least)
    return even[1] if even[0] < equal[0] and (least == 1 or len(tiles) <= room) else equal[1]


def makespan(lengths: Iterable[int], room: int) -> int:
    """When the last item ends, if each goes to the place that is free first."""
    places = [0] * room
    for length in lengths:
        heapq.heapreplace(places, places[0] + length + COST.value)
    return max(places)


def check(step: Step, made: tuple[list[Item], list[int]], room: Room | None = None) -> dict[tuple[int, int], list[Item]]:
    """All that holds of any plan. Its units as rows have them, a row's last Q block first: their parts by row and Q block."""
    (items, merges), room = made, room or step.room()
    meant = {i: row for i, row in enumerate(step.rows) if step.lens[0] <= row.q_len <= step.lens[1]}
    units = {(i, block): [] for i, row in meant.items() for block in reversed(range(-(-row.q_len // step.block_q)))}
    for item in items:
        units[item.row, item.q_block].append(item)
    for parts in units.values():
        parts.sort(key=lambda item: (item.begin, item.slot))
    tiles = [check_reads(step, parts) for parts in units.values()]

    cut = [parts for parts in units.values() if len(parts) > 1]
    assert all(item.parts == len(parts) for parts in units.values() for item in parts)
    assert [item.slot for parts in cut for item in parts] == list(range(sum(map(len, cut))))
    assert all(parts[0].slot == -1 for parts in units.values() if len(parts) == 1)
    assert sum(map(len, cut)) <= room.slots
    assert len(items) <= room.items
    assert merges == [items.index(parts[0]) for parts in cut]

    if tiles and not room.cut_tiles:
        assert [[part.end - part.begin for part in parts] for parts in units.values()] == schedule(tiles, room.at_once, step.least)
    lengths = [item.end - item.begin for item in items]
    share = -(-sum(t + COST.value for t in tiles) // room.at_once)
    width = (min(max(tiles, default=0), max([share + 2 * step.least, *lengths])) + 1) / CLASSES.value
    assert all(later - min(lengths[: i + 1]) < width for i, later in enumerate(lengths))  # the longest first, roughly
    return units


@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("name", MASKS)
def test_each_block_reads_what_its_tokens_see(name, programs, device):
    for rows in (ROWS, ROWS + GROUPED) if "spans" in MASKS[name] else (ROWS,):
        step = Step(rows, MASKS[name], programs=programs)
        units = check(step, plan(step, device))
        assert (max(map(len, units.values())) > 1) == (programs > 1)
        assert [(item.begin, item.end, item.hi_max) for item in units[4, 0]] == [(0, 0, 0)]  # a row without keys


@pytest.mark.parametrize("page", [1, 2, 4, 8, 3])
@pytest.mark.parametrize("name", ["causal", "window", "override", "rswa"])
def test_items_hold_the_pages_of_their_first_tile(name, page, device):
    """Those in sight and no other: entries whose keys nobody may see are never read."""
    step = Step(ROWS, MASKS[name], page=page, programs=64)
    items, _ = plan(step, device)
    for item in items:
        tile = item.begin if item.begin < item.head_tiles else item.start_tile + item.begin - item.head_tiles
        pages = range(tile * step.block_n // page, -(-(tile + 1) * step.block_n // page))
        seen = [p * page < item.prefix_max or (p * page < item.hi_max and (p + 1) * page > item.lo_min) for p in pages]
        wanted = [1000 * item.row + 1 + p if item.begin < item.end and in_sight else 0 for p, in_sight in zip(pages, seen, strict=True)]
        assert item.pages == (wanted if page != 3 else [])
    if page == 1 and name in ("window", "rswa"):
        assert any(0 in item.pages and item.begin < item.end and item.lo_min > item.start_tile * step.block_n for item in items)


@pytest.mark.parametrize("lens", [(1, 2), (3, 16), (17, 2**31 - 1), (4, 8)])
def test_rows_of_other_lengths_are_left_out(lens, device):
    step = Step(ROWS, {}, lens=lens)
    assert {row for row, _ in check(step, plan(step, device))} == {i for i, row in enumerate(ROWS) if lens[0] <= row.q_len <= lens[1]}


@pytest.mark.parametrize(
    ("units", "parts"),
    [
        (1, [[100 // 8 + 1] * 7 + [9]]),
        (2, [[25] * 4] * 2),
        (5, [[62, 38], [24, 65, 11], [51, 49], [13, 65, 22], [40, 60]]),
        (8, [[100]] * 8),
        (9, [[100]] * 8 + [[13] * 7 + [9]]),
        (16, [[100]] * 16),
    ],
)
def test_equal_rows_fill_the_room(units, parts, device):
    """In equal parts where those find a place each, and otherwise in shares of the step."""
    step = Step([Row(1, 400)] * units, {})
    found = check(step, plan(step, device)).values()
    assert [[item.end - item.begin for item in each] for each in found] == parts


def test_a_row_of_just_an_even_share_is_not_cut(device):
    step = Step([*[Row(1, 320)] * 8, Row(1, 364)], {}, least=8)  # 731 tiles for 8 places: 92 each at most
    assert [len(found) for found in check(step, plan(step, device)).values()] == [1] * 8 + [8]  # only to fill the last round


@pytest.mark.parametrize(("units", "keys", "parts"), [(2, 2000, 8), (5, 2000, 8), (8, 2000, 8), (9, 2000, 8), (40, 1440, 5)])
def test_one_long_row_is_cut_among_short_ones(units, keys, parts, device):
    step = Step([*[Row(1, 9)] * (units - 1), Row(1, keys)], {})
    items, _ = made = plan(step, device)
    assert items[0].row == units - 1  # the longest first
    assert [len(found) for found in check(step, made).values()] == [1] * (units - 1) + [parts]


@pytest.mark.parametrize(("units", "keys", "parts"), [(1, 100, [4]), (1, 32, [1]), (9, 72, [1] * 8 + [2]), (9, 28, [1] * 9)])
def test_parts_too_short_to_be_worth_a_merge_are_not_cut(units, keys, parts, device):
    step = Step([Row(1, keys)] * units, {}, least=8)
    assert [len(found) for found in check(step, plan(step, device)).values()] == parts


@pytest.mark.parametrize(
    ("tiles", "room", "least", "parts"),
    [
        ((14, 0), 2, 8, [[14], [0]]),  # longer than a share, but what would be cut off is short
        ((0, 23), 3, 8, [[0], [23]]),  # at either end
        ((1, 0, 14), 3, 8, [[1], [0], [14]]),
        ((8, 0), 2, 1, [[8], [0]]),  # a merge costs more than it saves
        ((1, 0, 3), 2, 1, [[1], [0], [3]]),  # equal parts would be merged too
    ],
)
def test_few_tiles_and_many_places(tiles, room, least, parts, device):
    step = Step([Row(1, 4 * n) for n in tiles], {}, least=least, programs=room)
    found = check(step, plan(step, device)).values()
    assert [[item.end - item.begin for item in each] for each in found] == parts


def test_longer_rows_come_first(device):
    rows = [Row(1, 40 * keys) for keys in (10, 380, 150, 40, 390, 200, 300, 20, 100)]
    step = Step(rows, {}, programs=1)
    items, _ = made = plan(step, device)
    check(step, made)
    assert [step.rows[item.row].kv_len // 40 for item in items] == [380, 390, 300, 200, 150, 100, 40, 20, 10]  # those of a class as they lie


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
    assert len(wanted[0]) > 100 and len(wanted[1]) > 20
    for lanes, poison in ((16, -1), (16, 1), (1024, 0)):
        monkeypatch.setattr(parameters, "LANES", lanes)
        assert plan(step, device, poison=poison) == wanted


@pytest.mark.parametrize("cut_tiles", [0, 2])
def test_room_for_more_than_the_step_has(cut_tiles, device):
    """Tables as the limits of an engine make them: what is not used is not read."""
    step = Step([Row(0, 9), Row(1, 90), Row(0, 0), Row(4, 30)], {}, cut_tiles=cut_tiles)
    room = room_for(50, 400, 24, 2, cut_tiles)
    check(step, plan(step, device, room), room)
    nothing = step._replace(rows=[Row(0, 9), Row(0, 0)])
    assert plan(nothing, device, room) == ([], [])


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


TILES = st.lists(st.integers(0, 30) | st.sampled_from([0, 1, 7, 8, 200]), min_size=1, max_size=40)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(tiles=TILES, room=st.integers(1, 26), least=st.sampled_from([1, 8]))
def test_no_schedule_needs_more_room_than_there_is(tiles, room, least):
    parts = [len(found) for found in schedule(tiles, room, least)]
    tables = room_for(len(tiles), max(tiles), room, 1, 0)
    assert sum(parts) <= tables.items
    assert sum(n for n in parts if n > 1) <= tables.slots
    assert sum(n > 1 for n in parts) <= tables.merges


@pytest.mark.parametrize("room", [16, 26, 33])
def test_places_end_together(room):
    """Against what no schedule beats, an even share of the tiles and the cost of an item: 4 % more on average, 17 % at most."""
    generator, ratios = random.Random(0), []
    for _ in range(300):
        units = generator.randint(1, 3 * room)
        row = generator.choice([lambda: 300, lambda: generator.randint(50, 600), lambda: generator.choice([100, generator.randint(500, 4000)])])
        tiles = [row() for _ in range(units)]
        lengths = [length for parts in schedule(tiles, room, 1) for length in parts]
        most = max(lengths) + 1
        ratios.append(makespan(sorted(lengths, key=lambda n, most=most: -(n * CLASSES.value // most)), room) / (sum(tiles) / room + COST.value))
    assert sum(ratios) / len(ratios) < 1.04 and max(ratios) < 1.17


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])  # to shrink a failure takes minutes
@given(step=steps(), more=st.integers(0, 30))
def test_random_steps(step, more, device):
    room = step.room()
    check(step, plan(step, device))
    limits = room_for(room.units + more, 200 + more, step.programs, step.kv_heads, step.cut_tiles)  # no row here has more tiles
    check(step, plan(step, device, limits), limits)

"""What an answer must show by itself: who took part, what may not matter, and which bits may not change."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from attnmux.backends import _triton_tiles
from attnmux.backends.triton_backend import TritonBackend
from attnmux.dispatch.spec import AttentionSpec, Limits
from attnmux.kernels.triton import launch
from attnmux.kernels.triton.config import launch_config
from attnmux.testing import Row, make_case
from attnmux.testing.measure import Answer, distance, expect_close, oracle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLAIN = AttentionSpec(4, 2, 64, torch.float32, page_size=8)
ROWS = (
    Row(1, 45, prefix_len=4),
    Row(3, 18),
    Row(0, 5),
    Row(20, 34, ((3, 9), (16, 30)), prefix_len=9, causal=False),
    Row(2, 0),
)
GROUPED = Row(3, 58, ((2, 7, 1), (20, 25, 0), (28, 31), (50, 57, 1)))
MASKS = {
    "causal": {},
    "not causal": {"causal": False},
    "per sequence": {"causal": "per_sequence"},
    "window": {"sliding_window": 7},
    "window both ways": {"sliding_window": 7, "causal": False},
    "chunk": {"chunk": (8, 1)},
    "override": {"mm_prefix": "override_window", "sliding_window": 4},
    "within": {"mm_prefix": "within_window", "sliding_window": 4},
    "rswa": {"rswa_window": 5},
    "packed": {"page_size": None},
}


def sees(spec: AttentionSpec, row: Row, q: int, k: int) -> bool:
    """The mask, one pair at a time, as the documentation words it."""
    causal = row.causal if spec.causal == "per_sequence" else spec.causal
    if spec.rswa_window:
        return k <= q and (k < row.prefix_len or q - k < spec.rswa_window)
    recent = (spec.sliding_window is None or q - k < spec.sliding_window) and (
        spec.chunk is None or q // spec.chunk[0] - k // spec.chunk[0] <= spec.chunk[1]
    )
    ahead = k <= q if causal else spec.sliding_window is None or k - q < spec.sliding_window
    spans = [(start, end, group[0] if group else -1 - i) for i, (start, end, *group) in enumerate(row.spans)]
    same = bool(spec.mm_prefix) and any(
        q_start <= q < q_end and k_start <= k < k_end and mine == theirs for q_start, q_end, mine in spans for k_start, k_end, theirs in spans
    )
    return (ahead or same) and recent if spec.mm_prefix == "within_window" else (ahead and recent) or same


@pytest.mark.parametrize("mask", MASKS)
def test_one_hot_values_read_out_which_keys_took_part(mask, attend, device):
    spec = PLAIN.replace(**MASKS[mask])
    rows = (*ROWS, GROUPED) if spec.mm_prefix else ROWS
    case = make_case(spec, rows, device=device)
    case.q.zero_()  # every visible key weighs the same, so the answer is the mean of the visible values
    for i, row in enumerate(rows):
        for key in range(row.kv_len):
            place = case.places[i][0] + key if spec.page_size is None else (case.places[i][key // 8], key % 8)
            case.v_cache[place] = torch.nn.functional.one_hot(torch.tensor(key), 64).to(case.v_cache)
    out = attend(case).out
    for i, row in enumerate(rows):
        for t, token in enumerate(out[case.tokens(i)]):
            q = row.kv_len - row.q_len + t
            seen = torch.tensor([float(key < row.kv_len and sees(spec, row, q, key)) for key in range(64)])
            torch.testing.assert_close(token, (seen / seen.sum().clamp(min=1)).expand(4, 64), rtol=1e-6, atol=1e-7)


def test_low_and_high_pages_give_the_same_bits(attend, device):
    spec = PLAIN.replace(sliding_window=9, return_lse=True)
    low, high = (attend(make_case(spec, ROWS, device=device, place=place)) for place in ("low", "high"))
    assert low.same_bits(high, slice(0, 26), slice(0, 26))


def test_a_changed_key_is_noticed_by_those_who_see_it(attend, device):
    case = make_case(PLAIN.replace(sliding_window=7), ROWS, device=device)
    before = attend(case).out
    for row, key in ((0, 40), (0, 2), (3, 20), (3, 33)):
        with case.changed_keys([(row, key)]):
            noticed = (attend(case).out != before).flatten(1).any(1)[: case.batch.num_tokens]
        want = torch.zeros_like(noticed)
        for t in range(ROWS[row].q_len):
            want[case.tokens(row).start + t] = sees(case.spec, ROWS[row], ROWS[row].kv_len - ROWS[row].q_len + t, key)
        assert torch.equal(noticed, want), (row, key)


@pytest.mark.parametrize("changes", [{}, {"sinks": True}, {"sliding_window": 60, "softcap": 3.0}], ids=lambda c: "-".join(c) or "plain")
def test_the_number_of_parts_changes_rounding_only(changes, attend, device, cpu):
    longer = 1 if INTERPRETED else 8  # a GPU's tiles are longer, and what fits two of them is not cut
    changes = {name: value * longer if name == "sliding_window" else value for name, value in changes.items()}
    case = make_case(PLAIN.replace(return_lse=True, **changes), (Row(1, 110 * longer), Row(2, 0), Row(20, 50 * longer)), device=device)
    n = case.batch.num_tokens
    answers = [attend(case, programs=programs) for programs in (1, 4, 64)]
    for answer in answers:
        expect_close(case, answer, oracle(cpu(case)))
        assert distance(answer.out[:n], answers[0].out[:n]) < 2e-6
    assert not torch.equal(answers[0].out[:n], answers[2].out[:n])  # it was cut


def test_dirty_workspace_is_not_read(machine, device, attend, cpu):
    case = make_case(PLAIN.replace(return_lse=True, sinks=True), (*ROWS, Row(1, 150)), device=device)
    backend = TritonBackend(case.spec, machine, {"programs": 64})
    backend.limits = Limits(8, 64, 160, 32)
    workspace = torch.full((backend.workspace_bytes(backend.limits),), 0xFF, dtype=torch.uint8, device=device)  # NaN
    state = backend.plan(case.batch, workspace, None)
    assert any(int(work.count[1]) > 0 for work in state.work.values())
    assert state.work["decode"].slot_out.untyped_storage().data_ptr() == workspace.untyped_storage().data_ptr()
    expect_close(case, attend(case, backend=backend, state=state), oracle(cpu(case)))


@pytest.mark.parametrize("lengths", ["exact", "upper_bound"])
@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 20}, {"mm_prefix": "override_window", "sliding_window": 3}], ids=lambda c: "-".join(c) or "plain"
)
def test_the_bits_of_a_row_depend_on_the_row_alone(changes, lengths, attend, device, machine, monkeypatch, cpu):
    monkeypatch.setattr("attnmux.backends._triton_tiles.INVARIANT_CUT_KEYS", 32)
    spec = PLAIN.replace(dtype=torch.float16, batch_invariant=True, return_lse=True, **changes)
    rows = (*ROWS[:4], Row(2, 100, ((20, 100),)), Row(1, 33), Row(12, 40))
    together = make_case(spec, rows, device=device)
    backend = TritonBackend(spec, machine, {"programs": 3})
    backend.limits = Limits(16, 64, 200, 32)
    answer = attend(together, backend=backend)
    expect_close(together, answer, oracle(cpu(together)))
    bounded = make_case(spec, rows, device=device, lengths=lengths)
    for row in (0, 1, 3, 4, 5, 6):
        single = attend(bounded.alone(row))
        assert single.same_bits(answer, slice(0, rows[row].q_len), together.tokens(row)), rows[row]


def test_a_plan_made_anew_equals_a_new_one(machine, device, attend, cpu):
    spec = PLAIN.replace(return_lse=True, sliding_window=40)
    backend = TritonBackend(spec, machine, {"programs": 8})
    backend.limits = Limits(4, 64, 150, 40)  # 19 pages a row; the table has 20 columns
    state = None
    for rows in ((Row(1, 9), Row(20, 30), Row(0, 3)), (Row(1, 150), Row(33, 35), Row(4, 60)), (Row(0, 150), Row(17, 17), Row(16, 16))):
        case = make_case(spec, rows, device=device)
        held = {} if state is None else {name: work.items.data_ptr() for name, work in state.work.items()}
        state = backend.plan(case.batch, None, state)
        assert all(work.items.data_ptr() == held.get(name, work.items.data_ptr()) for name, work in state.work.items())
        expect_close(case, attend(case, backend=backend, state=state), oracle(cpu(case)))


def test_a_plan_without_limits_grows(machine, device, attend, cpu):
    backend = TritonBackend(PLAIN, machine, {"programs": 64})
    small, large = (make_case(PLAIN, (Row(1, keys),), device=device) for keys in (9, 150))
    state = backend.plan(large.batch, None, backend.plan(small.batch, None, None))
    expect_close(large, attend(large, backend=backend, state=state), oracle(cpu(large)))


def test_views_with_gaps_are_read_and_written_in_place(machine, device, cpu):
    case = make_case(PLAIN, ROWS, device=device)
    n = case.q.shape[0]
    wide_q = torch.full((n, 4, 2, 80), torch.nan, device=device)
    wide_q[:, :, 1, 8:72] = case.q
    wide_out = torch.full((4, n, 96), torch.nan, device=device)  # heads before tokens
    out = wide_out.transpose(0, 1)[..., 16:80]
    case = dataclasses.replace(case, q=wide_q[:, :, 1, 8:72])
    backend = TritonBackend(PLAIN, machine, {"programs": 8})
    backend.run(case.q, case.k_cache, case.v_cache, backend.plan(case.batch, None, None), out, None, case.layer_args)
    expect_close(case, Answer(out.cpu(), None), oracle(cpu(case)))
    assert bool(wide_out[..., :16].isnan().all()) and bool(wide_out[..., 80:].isnan().all())


def test_rows_without_a_token_in_a_span_bring_no_spans(machine, device):
    spec = PLAIN.replace(mm_prefix="override_window")
    text = make_case(spec, (Row(1, 45, ((3, 9),)), Row(17, 40, ((3, 9), (50, 60)))), device=device)
    backend = TritonBackend(spec, machine, {})
    assert backend.plan(text.batch, None, None).rows.row_spans is None
    image = make_case(spec, (Row(1, 45, ((3, 9),)), Row(17, 40, ((3, 9), (30, 40, 2)))), device=device)
    rows = backend.plan(image.batch, None, None).rows
    assert rows.groups
    assert rows.row_spans.tolist() == [[3, 9, -1], [30, 40, 0]]
    assert rows.row_span_start.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mm_prefix": "override_window"},
        {"page_size": None, "kv_dtype": torch.float8_e5m2, "kv_scale": "head"},
        {"attn_type": "encoder_only"},
        {"rswa_window": 4},
        {"batch_invariant": True},
    ],
    ids=lambda c: "-".join(c) or "plain",
)
def test_warmup_launches_everything_the_limits_reach(changes, machine, device, monkeypatch):

    monkeypatch.setattr("attnmux.backends._triton_tiles.INVARIANT_CUT_KEYS", 32)
    spec, limits = PLAIN.replace(**changes), Limits(4, 128, 200, 32)
    backend = TritonBackend(spec, machine, {"programs": 4})
    backend.limits = limits
    seen: dict[str, set[tuple]] = {"of_attention": set(), "of_merging": set()}

    def spy(name):
        inner = getattr(launch, name)

        def asked(*args):
            rows = next((arg for arg in args if isinstance(arg, launch.Rows)), None)
            config = next(arg for arg in args if isinstance(arg, launch.Work)).config
            seen[name].add((config,) if rows is None else (config, rows.row_spans is not None, rows.groups))
            return inner(*args)

        monkeypatch.setattr(launch, name, asked)

    for name in seen:
        spy(name)
    backend.warmup(limits)
    spans = ((False, False), (True, False), (True, True)) if spec.mm_prefix else ((False, False),)
    steps = [(Row(n, n),) for n in (1, 2, 3, 5, 8, 9, 16, 17, 32)] + [(Row(32, 32),) * 4]
    plans = [backend.plan(make_case(spec, step, device=device).batch, None, None) for step in steps]
    reached = [work for state in plans for work in state.work.values()]
    assert seen["of_attention"] == {(work.config, *form) for work in reached for form in spans}
    assert seen["of_merging"] == {(work.config,) for work in reached if work.slot_lse.shape[0]} != set()  # the merging kernel too


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 90}, {"mm_prefix": "override_window"}], ids=lambda c: "-".join(c) or "plain")
def test_descriptors_read_what_pointers_read(layout, changes, machine, device, attend, cpu):
    if not INTERPRETED and "tma" not in machine.features:
        pytest.skip("the device has no tensor descriptors")
    spec = PLAIN.replace(dtype=torch.float16, page_size=128, kv_layout=layout, return_lse=True, **changes)
    rows = (Row(1, 300), Row(3, 128), Row(40, 210, ((100, 200),)), Row(0, 9), Row(2, 0))
    case = make_case(spec, rows, device=device)
    answers = []
    for described in (False, True):
        backend = TritonBackend(spec, machine, {"programs": 8})
        backend._features = dataclasses.replace(backend._features, descriptors=described)
        answers.append(attend(case, backend=backend))
        expect_close(case, answers[-1], oracle(cpu(case)))
    n = case.batch.num_tokens
    if INTERPRETED:  # a compiler may order additions as it likes
        assert answers[0].same_bits(answers[1], slice(0, n), slice(0, n))


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 30, "softcap": 20.0}, {"rswa_window": 20}, {"mm_prefix": "override_window", "alibi": "linear"}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_page_ids_read_ahead_lead_to_the_same_pages(page_size, changes, machine, device, attend, cpu, monkeypatch):
    """However many tiles ahead, over items that begin anywhere and hold the pages of their first tiles or not."""
    spec = PLAIN.replace(dtype=torch.float16, page_size=page_size, return_lse=True, **changes)
    rows = (Row(1, 130, prefix_len=40), Row(3, 40), Row(24, 90, ((40, 85),), prefix_len=78), Row(0, 9), Row(2, 0), Row(1, 20))
    case = make_case(spec, rows, device=device)
    answers = []
    for ahead in (0, 1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(_triton_tiles, "launch_config", lambda *args, ahead=ahead: dataclasses.replace(launch_config(*args), prefetch=ahead))
            answers.append(attend(case, backend=TritonBackend(spec, machine, {"programs": 8})))
    want, n = oracle(cpu(case)), case.batch.num_tokens
    for answer in answers:
        expect_close(case, answer, want)
    if INTERPRETED:  # a compiler may order additions as it likes
        assert all(answers[0].same_bits(answer, slice(0, n), slice(0, n)) for answer in answers[1:])


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 30, "sinks": True}, {"rswa_window": 20}, {"mm_prefix": "override_window"}, {"attn_type": "encoder_only"}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_a_step_that_fills_the_device_has_larger_tiles(changes, machine, device, attend, cpu):
    """With one program few query tokens fill it. A graph that holds such a step replays any other."""
    size, longer = (64, 1) if INTERPRETED else (128, 4)
    spec = PLAIN.replace(dtype=torch.float16, head_size=size, page_size=16, return_lse=True, **changes)
    long, keys = 70 * longer, (70 if changes.get("attn_type") else 130) * longer
    lens = ((21, 21), (long, keys), (3, 3)) if changes.get("attn_type") else ((24, 60), (long, keys), (2, 40), (0, 7))
    rows = tuple(Row(n, keys, ((keys - n + 2, keys - 1),) if n == long else (), prefix_len=keys // 2) for n, keys in lens)
    case, short = (make_case(spec, some, device=device) for some in (rows, [row if row.q_len < long else Row(0, 9) for row in rows]))
    backend = TritonBackend(spec, machine, {"programs": 1})
    backend.limits = Limits(8, 200 * longer, 200 * longer, 100 * longer)
    workspace = torch.full((backend.workspace_bytes(backend.limits),), 0xFF, dtype=torch.uint8, device=device)  # NaN
    state = backend.plan(case.batch, workspace, None)
    assert {work.slot_out.untyped_storage().data_ptr() for work in state.work.values()} == {workspace.untyped_storage().data_ptr()}
    expect_close(case, attend(case, backend=backend, state=state), oracle(cpu(case)))
    later = backend.plan(short.batch, None, state)
    assert ("long" in state.now) == ("long" in later.work and "long" not in later.now) == (INTERPRETED or machine.arch == "sm90")
    want = oracle(cpu(short))
    expect_close(short, attend(short, backend=backend, state=later), want)
    held = dataclasses.replace(later, now={kind: later.work[kind] for kind in state.now})  # what a graph of the first step launches
    expect_close(short, attend(short, backend=backend, state=held), want)


def test_parts_of_a_row_merge_alike_whatever_else_merges(machine, device, attend, monkeypatch):
    monkeypatch.setattr("attnmux.backends._triton_tiles.INVARIANT_CUT_KEYS", 16)
    spec = PLAIN.replace(page_size=16, return_lse=True, batch_invariant=True)
    long = Row(1, 20 * 16)
    together, alone = make_case(spec, (long, *[Row(1, 20)] * 10), device=device), make_case(spec, (long,), device=device)
    alone.q.copy_(together.q[: alone.q.shape[0]])
    columns = slice(0, 20)
    for mine, theirs in ((alone.k_cache, together.k_cache), (alone.v_cache, together.v_cache)):
        mine[alone.batch.block_table[0, columns].long()] = theirs[together.batch.block_table[0, columns].long()]
    answers = []
    for case in (together, alone):
        backend = TritonBackend(spec, machine, {"programs": 64})
        backend.limits = Limits(64, 64, 1024, 1)  # room for more merges than there are
        answers.append(attend(case, backend=backend))
    assert answers[0].same_bits(answers[1], slice(0, 1), slice(0, 1))


@pytest.mark.parametrize("page_size", [3, 8, 16, 48])
def test_rows_that_fill_up_a_tile_read_nothing(page_size, attend, device, cpu):
    """Three heads a group leave rows of a tile empty. What those would see lies behind the block, where no page is looked up."""
    spec = AttentionSpec(3, 1, 64, torch.float16, page_size=page_size, mm_prefix="within_window", sliding_window=9)
    longer = 1 if INTERPRETED else 4
    rows = (Row(20 * longer, 33 * longer, ((2, 4, 0), (6, 9, 0))), Row(18 * longer, 18 * longer, ((1, 4, 0), (6, 9, 0), (11, 15, 1))))
    case = make_case(spec, rows, device=device, place="high")
    case.k_cache[0] = case.v_cache[0] = torch.nan  # where a lookup that is masked out would lead
    expect_close(case, attend(case), oracle(cpu(case)))


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, two apart, with others between them."""
    wide = torch.full((*tensor.shape, 2), 7, dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize("limits", [None, Limits(8, 64, 160, 32)], ids=["none", "limits"])
@pytest.mark.parametrize("changes", [{}, {"rswa_window": 5}, {"causal": "per_sequence"}, {"page_size": None}], ids=lambda c: "-".join(c) or "plain")
def test_small_tensors_may_be_columns_of_larger_ones(changes, limits, machine, device, attend, cpu):
    spec = PLAIN.replace(sinks=True, alibi=None if changes else "linear", **changes)
    case = make_case(spec, ROWS, device=device)
    want = oracle(cpu(case))
    names = ("query_start_loc", "seq_lens", "block_table", "kv_start_loc", "causal", "prefix_lens")
    strided = {name: spread(value) for name in names if (value := getattr(case.batch, name)) is not None}
    layer = {name: spread(value) for name, value in case.layer.items()}
    backend = TritonBackend(spec, machine, {"programs": 8})
    backend.limits = limits
    expect_close(case, attend(dataclasses.replace(case, batch=dataclasses.replace(case.batch, **strided), layer=layer), backend=backend), want)


@pytest.mark.parametrize("limits", [Limits(4, 64, 8, 32), Limits(2, 64, 4, 32)])
@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_warmup_stays_within_short_limits(kind, limits, machine):
    backend = TritonBackend(PLAIN.replace(attn_type=kind), machine, {})
    backend.limits = limits
    backend.warmup(limits)


@pytest.mark.parametrize("programs", [0, -3, 1.7, True, "x", 10**9, float("nan")])
def test_programs_are_a_whole_number(programs, machine):
    with pytest.raises(ValueError, match=r"programs in the options of triton is .*, wanted a whole number from 1"):
        TritonBackend(PLAIN, machine, {"programs": programs})

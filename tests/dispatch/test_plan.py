"""Plans: rows to routes, gathered and scattered where they must be, refreshed in place, several at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_plugins import OtherBackend, TinyBackend, claim, info, lab, registry
from torch import Tensor

import attnmux
from attnmux.dispatch import operator
from attnmux.dispatch.constraints import ANY, YES_OR_NO, OneOf
from attnmux.dispatch.platform import Order, when
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.rows import group_rows
from attnmux.dispatch.spec import AttentionSpec

Install = Callable[[Registry], Registry]
PAGES, PAGE = 64, 4


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[tuple[str, Any]]]:
    """What the fake backends are asked, in order."""
    TinyBackend.calls.clear()
    yield TinyBackend.calls
    TinyBackend.calls.clear()


def two(install: Install, *orders: Order | str) -> Registry:
    """``tiny`` and ``other``, which compute the same, under the given orders."""
    able = claim(mm_prefix=ANY, return_lse=YES_OR_NO, lengths=OneOf("exact", "upper_bound"))
    backends = [info("tiny", able), info("other", able, implementation=OtherBackend)]
    return install(registry(platforms=[lab(*(orders or ("tiny>other",)))], backends=backends))


BY_CLASS = (Order(("other",), "decode", when(row_class="decode")), Order(("tiny",), "the rest"))


@dataclass
class Step:
    """Rows of the given lengths with tables, caches and queries, the unused memory poisoned with NaN."""

    spec: AttentionSpec
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    padding: int = 2

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(sum(self.q_lens) + 100 * sum(self.kv_lens))
        cols = max(1, -(-max(self.kv_lens, default=0) // PAGE))
        pages = torch.randperm(PAGES, generator=generator)[: len(self.kv_lens) * cols].view(-1, cols).int()
        shape = (PAGES, PAGE, self.spec.num_kv_heads, self.spec.head_size)
        self.k, self.v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for row, length in enumerate(self.kv_lens):
            at = torch.arange(length)
            where = pages[row, at // PAGE].long(), at % PAGE
            for cache in (self.k, self.v):
                cache[where] = torch.randn((length, *shape[2:]), generator=generator)
        tokens = sum(self.q_lens) + self.padding
        self.q = torch.randn((tokens, self.spec.num_q_heads, self.spec.head_size), generator=generator)
        self.q[sum(self.q_lens) :] = torch.nan
        starts = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        self.batch = attnmux.Batch(starts, torch.tensor(self.kv_lens, dtype=torch.int32), pages)

    def expected(self) -> tuple[Tensor, Tensor]:
        return attnmux.reference_attention(self.q, self.k, self.v, self.spec, self.batch, compute_dtype=torch.float64)

    def run(self, attn: attnmux.Attention, plan: attnmux.Plan, **options: Any) -> Any:
        return attn.run(self.q, self.k, self.v, plan, **options)

    def check(self, attn: attnmux.Attention, plan: attnmux.Plan, oracle: Tensor) -> None:
        out = torch.full((*self.q.shape[:2], self.spec.v_head_size), 7.0)
        assert self.run(attn, plan, out=out) is out
        tokens = sum(self.q_lens)
        torch.testing.assert_close(out[:tokens].double(), oracle[:tokens], rtol=0, atol=2e-6)
        assert (out[tokens:] == 7).all()


@pytest.fixture
def oracle_of(install: Install) -> Callable[[Step], Tensor]:
    """The reference's answer, computed before any other registry is put in place."""
    from attnmux.dispatch import host

    made = Registry(["attnmux.platforms.cpu", "attnmux.backends.reference"], entry_points=False)

    def compute(step: Step) -> Tensor:
        with host.using(made):
            return step.expected()[0]

    return compute


MIXED = ([5, 1, 17, 16, 0, 2, 20], [9, 9, 17, 30, 12, 2, 21])  # decode, decode, prefill, decode, none, decode, prefill


def test_rows_go_to_their_classes_and_routes(install: Install, spec: AttentionSpec) -> None:
    two(install, *BY_CLASS)
    plan = attnmux.Attention(spec, "cpu").plan(Step(spec, *MIXED).batch)
    assert plan.row_classes == ("decode", "decode", "prefill", "decode", None, "decode", "prefill")
    assert plan.routes == {"prefill": ("tiny",), "decode": ("other",)}
    assert plan.num_tokens == 61


def test_rows_of_a_route_that_do_not_stand_together_are_gathered_and_scattered(
    install: Install, spec: AttentionSpec, calls: list[tuple[str, Any]], oracle_of: Callable[[Step], Tensor]
) -> None:
    step = Step(spec, *MIXED)
    oracle = oracle_of(step)
    two(install, *BY_CLASS)
    attn = attnmux.Attention(spec, "cpu")
    step.check(attn, attn.plan(step.batch), oracle)
    planned = [what for verb, what in calls if verb == "plan"]
    assert planned == [("OtherBackend", [5, 1, 16, 2]), ("TinyBackend", [17, 20])]
    two(install)
    whole = attnmux.Attention(spec, "cpu")
    step.check(whole, whole.plan(step.batch), oracle)
    assert calls[-2] == ("plan", ("TinyBackend", list(MIXED[0])))


def test_neighbouring_rows_are_passed_as_views() -> None:
    groups = group_rows(["a", "a", None, "a", "b", "b"], [3, 1, 0, 2, 4, 4])
    assert [(g.backend, g.rows, g.tokens) for g in groups] == [("a", (0, 1, 3), (0, 6)), ("b", (4, 5), (6, 14))]
    [apart, between] = group_rows(["a", "b", "a"], [1, 1, 1])
    assert (apart.tokens, between.tokens) == (None, (1, 2))
    [apart, _] = group_rows(["a", "b", "a"], [1, 0, 1])  # the row between may come back
    assert apart.tokens is None
    assert group_rows([None, None], [0, 0]) == []


def test_a_route_is_split_by_class_where_that_spares_a_copy() -> None:
    routes, lens = ["a", "b", "a", "a"], [30, 20, 1, 2]
    groups = group_rows(routes, lens, ["image", "prefill", "decode", "decode"])
    assert [(g.backend, g.rows, g.tokens, g.row_class) for g in groups] == [
        ("a", (0,), (0, 30), "image"),
        ("a", (2, 3), (50, 53), "decode"),
        ("b", (1,), (30, 50), None),
    ]
    mixed = group_rows(routes, lens, ["image", "prefill", "decode", "image"])
    assert [(g.backend, g.rows, g.tokens, g.row_class) for g in mixed] == [("a", (0, 2, 3), None, None), ("b", (1,), (30, 50), None)]
    together = group_rows(["a", "a", "b"], [30, 1, 20], ["image", "decode", "prefill"])
    assert [(g.rows, g.tokens, g.row_class) for g in together] == [((0, 1), (0, 31), None), ((2,), (31, 51), None)]


def test_lse_is_scattered_too(install: Install, spec: AttentionSpec) -> None:
    spec = spec.replace(return_lse=True)
    step = Step(spec, *MIXED)
    two(install, *BY_CLASS)
    apart = attnmux.Attention(spec, "cpu")
    out, lse = step.run(apart, apart.plan(step.batch))
    two(install)
    whole = attnmux.Attention(spec, "cpu")
    same_out, same_lse = step.run(whole, whole.plan(step.batch))
    assert torch.equal(lse[:61], same_lse[:61])
    assert torch.equal(out[:61], same_out[:61])
    assert (lse.dtype, lse.shape) == (torch.float32, (63, spec.num_q_heads))


def test_only_one_class_runs_and_the_rest_of_out_is_left_alone(install: Install, spec: AttentionSpec, calls: list[tuple[str, Any]]) -> None:
    two(install, *BY_CLASS)
    step = Step(spec, *MIXED)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(step.batch)
    full = step.run(attn, plan)
    decode = torch.cat([torch.arange(0, 6), torch.arange(23, 39), torch.arange(39, 41)])
    for row_class, tokens in (("decode", decode), ("prefill", torch.cat([torch.arange(6, 23), torch.arange(41, 61)]))):
        out = torch.full_like(full, 7.0)
        calls.clear()
        step.run(attn, plan, out=out, only=row_class)
        assert torch.equal(out[tokens], full[tokens])
        others = torch.ones(63, dtype=torch.bool).index_fill(0, tokens, False)
        assert (out[others] == 7).all()
        assert {what[0] for verb, what in calls if verb == "run"} == {"OtherBackend" if row_class == "decode" else "TinyBackend"}


def test_one_class_of_several_that_one_backend_runs(install: Install, spec: AttentionSpec) -> None:
    two(install)
    step = Step(spec, *MIXED)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(step.batch)
    full = step.run(attn, plan)
    pieces = torch.full_like(full, 7.0)
    for row_class in ("prefill", "decode"):
        step.run(attn, plan, out=pieces, only=row_class)
    assert torch.equal(pieces[:61], full[:61])


def test_only_a_class_without_rows_does_nothing(install: Install, spec: AttentionSpec) -> None:
    two(install)
    step = Step(spec, [1, 1], [4, 5])
    attn = attnmux.Attention(spec, "cpu")
    out = torch.full((4, 4, 16), 7.0)
    step.run(attn, attn.plan(step.batch), out=out, only="prefill")
    assert (out == 7).all()


@pytest.mark.parametrize(("q_lens", "kv_lens"), [([], []), ([0, 0], [5, 0]), ([1], [0]), ([3, 0, 1], [0, 7, 9])])
def test_empty_and_padding_rows(
    q_lens: list[int], kv_lens: list[int], install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]
) -> None:
    step = Step(spec, q_lens, kv_lens)
    oracle = oracle_of(step)
    two(install, *BY_CLASS)
    attn = attnmux.Attention(spec, "cpu")
    step.check(attn, attn.plan(step.batch), oracle)


def test_a_refreshed_plan_is_the_same_object_for_another_step(
    install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor], calls: list[tuple[str, Any]]
) -> None:
    first, second = Step(spec, [1, 2, 17], [4, 5, 17]), Step(spec, [2, 1, 20], [29, 8, 31])
    oracles = oracle_of(first), oracle_of(second)
    two(install, *BY_CLASS)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(first.batch)
    handle, states = plan.handle, [id(part.state) for part in plan._parts]
    first.check(attn, plan, oracles[0])
    first.run(attn, plan, only="decode")
    assert attn.plan(second.batch, into=plan) is plan
    assert plan.handle is handle
    assert [id(part.state) for part in plan._parts] == states
    second.check(attn, plan, oracles[1])
    second.run(attn, plan, only="decode", out=(out := torch.full((25, 4, 16), 7.0)))
    torch.testing.assert_close(out[:3].double(), oracles[1][:3], rtol=0, atol=2e-6)
    assert attn.plan(first.batch, into=plan).num_tokens == 20
    first.check(attn, plan, oracles[0])


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "was"),
    [([1, 17, 1], [4, 17, 9], "2 decode, 1 prefill"), ([1, 1], [4, 9], "2 decode"), ([1, 1, 1, 1], [4, 5, 9, 9], "4 decode"), ([], [], "no rows")],
)
def test_a_refresh_with_other_classes_raises_and_changes_nothing(
    q_lens: list[int], kv_lens: list[int], was: str, install: Install, spec: AttentionSpec
) -> None:
    two(install)
    step = Step(spec, [1, 2, 3], [4, 5, 9])
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(step.batch)
    before = step.run(attn, plan)[:6].clone()
    with pytest.raises(ValueError) as caught:
        attn.plan(Step(spec, q_lens, kv_lens).batch, into=plan)
    turned = {"2 decode, 1 prefill": "1 prefill, 2 decode"}.get(was, was)
    assert str(caught.value) == f"into is a plan of 3 decode, wanted {turned}; make a new plan"
    assert plan.row_classes == ("decode",) * 3
    assert torch.equal(step.run(attn, plan)[:6], before)


def test_rows_become_padding_and_come_back(install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]) -> None:
    full, fewer, none = Step(spec, [1, 1, 1], [4, 5, 9]), Step(spec, [1, 0, 1], [6, 3, 11]), Step(spec, [0, 0, 0], [6, 3, 11])
    oracles = oracle_of(full), oracle_of(fewer)
    two(install)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(full.batch)
    state = id(plan._parts[0].state)
    for step, oracle in ((fewer, oracles[1]), (none, oracles[1][:0]), (full, oracles[0])):
        step.check(attn, attn.plan(step.batch, into=plan), oracle)
        assert all(id(part.state) == state for part in plan._parts)
    attn.plan(none.batch, into=plan)
    with pytest.raises(ValueError, match="into is a plan of 3 decode, wanted 1 prefill, 2 decode"):  # not forgotten meanwhile
        attn.plan(Step(spec, [17, 1, 1], [17, 5, 9]).batch, into=plan)


BANDED = (Order(("other",), "long", kv_len=(8, None)), Order(("tiny",), "the rest"))


def test_bands_send_rows_of_one_class_to_several_backends(install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]) -> None:
    step = Step(spec, [1, 2, 3, 1], [4, 8, 7, 30])
    oracle = oracle_of(step)
    two(install, *BANDED)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(step.batch)
    assert plan.routes == {"decode": ("tiny", "other")}
    step.check(attn, plan, oracle)


def test_a_refresh_into_another_band_raises_instead_of_running_the_old_route(install: Install, spec: AttentionSpec) -> None:
    two(install, *BANDED)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(Step(spec, [1, 1], [4, 9]).batch)
    attn.plan(Step(spec, [1, 1], [7, 30]).batch, into=plan)
    with pytest.raises(
        ValueError, match=r"into is a plan that sends row 0 to tiny, wanted other; its new length is in another band: make a new plan"
    ):
        attn.plan(Step(spec, [1, 1], [8, 9]).batch, into=plan)
    assert plan.routes == {"decode": ("tiny", "other")}


def test_several_plans_live_at_once(install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]) -> None:
    steps = [Step(spec, *MIXED), Step(spec, [1, 1], [3, 4]), Step(spec, [30], [30])]
    oracles = [oracle_of(step) for step in steps]
    two(install, *BY_CLASS)
    attn = attnmux.Attention(spec, "cpu")
    plans = [attn.plan(step.batch) for step in steps]
    assert len({int(plan.handle) for plan in plans}) == 3
    for _ in range(2):
        for step, plan, oracle in zip(steps, plans, oracles, strict=True):
            step.check(attn, plan, oracle)


def test_a_dropped_plan_is_freed(install: Install, spec: AttentionSpec) -> None:
    two(install)
    attn = attnmux.Attention(spec, "cpu")
    handle = int(attn.plan(Step(spec, [1], [1]).batch).handle)
    gc.collect()
    assert handle not in operator._objects


def test_workspace_is_allocated_once_from_limits_or_grows(install: Install, spec: AttentionSpec) -> None:
    two(install)
    limits = attnmux.Limits(max_num_seqs=8, max_num_tokens=64, max_seq_len=64, max_query_len=32)
    attn = attnmux.Attention(spec, "cpu", limits=limits)
    assert attn.workspace_bytes() == attn.workspace_bytes(limits) == 64
    spaces = [attn.plan(Step(spec, [1] * n, [4] * n).batch)._parts[0].state["workspace"] for n in (2, 8)]
    assert spaces[0] is spaces[1]
    assert (spaces[0].numel(), spaces[0].dtype) == (64, torch.uint8)
    growing = attnmux.Attention(spec, "cpu")
    sizes = [growing.plan(Step(spec, [1] * n, [4] * n).batch)._parts[0].state["workspace"].numel() for n in (2, 5, 3)]
    assert sizes == [16, 40, 40]


def test_upper_bound_lengths(install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]) -> None:
    step = Step(spec, [1, 2], [4, 9])
    oracle = oracle_of(step)
    two(install)
    attn = attnmux.Attention(spec, "cpu")
    bounded = attnmux.Batch(
        step.batch.query_start_loc, step.batch.seq_lens, step.batch.block_table, query_lens_cpu=[1, 2], seq_lens_cpu=[12, 10], lengths="upper_bound"
    )
    step.check(attn, attn.plan(bounded), oracle)


def test_a_row_with_a_span_is_an_image_row_while_its_span_is_in_the_step(install: Install, spec: AttentionSpec) -> None:
    spec = spec.replace(mm_prefix="override_window")
    two(install)
    attn = attnmux.Attention(spec, "cpu")

    def classes(q_len: int, kv_len: int, *spans: tuple[int, int], **fields: Any) -> Any:
        batch = Step(spec, [q_len], [kv_len]).batch
        batch.mm_spans = [list(spans)]
        for name, value in fields.items():
            setattr(batch, name, value)
        return attn.plan(batch).row_classes[0]

    assert classes(6, 10, (4, 8)) == "image"
    assert classes(2, 10, (4, 8)) == "decode"  # the step's tokens are 8 and 9
    assert classes(3, 10, (4, 8)) == "image"
    assert classes(20, 40, (4, 8)) == "prefill"
    assert classes(5, 5, (5, 9)) == "decode"  # the span is yet to come
    assert classes(20, 20) == "prefill"
    # a bound does not say where the step's tokens are: any span counts
    assert classes(2, 10, (4, 8), seq_lens_cpu=[11], lengths="upper_bound") == "image"


def test_cached_keys_are_written_where_the_slots_say(install: Install, spec: AttentionSpec) -> None:
    two(install)
    attn = attnmux.Attention(spec, "cpu")
    k_cache, v_cache = torch.zeros(PAGES, PAGE, 2, 16), torch.zeros(PAGES, PAGE, 2, 16)
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    attn.write_kv(k, v, k_cache, v_cache, torch.tensor([9, -1, 255]))
    assert torch.equal(k_cache[2, 1], k[0])
    assert torch.equal(v_cache[63, 3], v[2])
    assert int((k_cache != 0).any(-1).any(-1).sum()) == 2


def test_padding_stays_with_the_rows_it_was_planned_with(
    install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor], calls: list[tuple[str, Any]]
) -> None:
    full, fewer = Step(spec, [1, 2, 17, 18], [4, 5, 17, 30]), Step(spec, [1, 0, 0, 19], [6, 3, 8, 30])
    oracles = oracle_of(full), oracle_of(fewer)
    two(install, *BY_CLASS)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(full.batch)
    states = [id(part.state) for part in plan._parts]
    calls.clear()
    fewer.check(attn, attn.plan(fewer.batch, into=plan), oracles[1])
    assert [what for verb, what in calls if verb == "plan"] == [("OtherBackend", [1, 0]), ("TinyBackend", [0, 19])]
    assert [id(part.state) for part in plan._parts] == states
    full.check(attn, attn.plan(full.batch, into=plan), oracles[0])


def test_one_class_of_a_composition_is_planned_once(install: Install, spec: AttentionSpec, calls: list[tuple[str, Any]]) -> None:
    two(install, *BY_CLASS)
    step = Step(spec, *MIXED)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(step.batch)
    calls.clear()
    step.run(attn, plan, only="decode")
    step.run(attn, plan, only="prefill")
    assert [verb for verb, _ in calls if verb == "plan"] == []


CAPTURED = {  # steps before and after, and whether a graph over the decode rows may run the second
    "other lengths": ([1, 2, 17], [3, 1, 20], True),
    "padding": ([1, 2, 17], [1, 0, 20], True),
    "all padding": ([1, 2, 17], [0, 0, 0], True),
    "behind other rows": ([17, 1, 2], [17, 2, 1], True),
    "moved": ([17, 1, 2], [20, 1, 2], False),
    "gathered": ([1, 17, 2], [2, 20, 1], True),
    "fewer gathered": ([1, 17, 2], [1, 17, 1], False),
    "gathered around padding": ([1, 17, 2], [2, 0, 1], True),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_what_a_graph_holds_stays_where_it_was(name: str, install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]) -> None:
    """There is no graph on a CPU: the test says that one was captured. tests/gpu/test_composition.py captures for real."""
    before, after, allowed = CAPTURED[name]
    first, second = Step(spec, before, [30] * 3), Step(spec, after, [31] * 3)
    oracle = oracle_of(second)
    two(install, *BY_CLASS)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(first.batch)
    second.check(attn, attn.plan(second.batch, into=attn.plan(first.batch)), oracle)  # without a graph anything goes
    [part] = [part for part in plan._parts if part.group.backend == "other"]
    part.captured, index = True, part.index
    if allowed:
        second.check(attn, attn.plan(second.batch, into=plan), oracle)
        [part] = [part for part in plan._parts if part.group.backend == "other"]
        assert part.captured
        assert part.index is index
    else:
        with pytest.raises(ValueError, match=r"into is a plan whose rows \[.*\] of other, .* are in a CUDA graph.*make a new plan and capture that"):
            attn.plan(second.batch, into=plan)
        assert plan.batch is first.batch


def test_classes_of_a_split_route_run_and_refresh(install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]) -> None:
    spec = spec.replace(mm_prefix="override_window")
    first, second = Step(spec, [20, 17, 1, 2], [30, 17, 9, 5]), Step(spec, [25, 0, 2, 1], [29, 3, 8, 7])
    for step in (first, second):
        step.batch.mm_spans = [[(12, 13)], [], [], []]  # a span of one token changes the class and nothing else
    oracles = oracle_of(first), oracle_of(second)
    two(install, Order(("other",), "text", when(row_class="prefill")), Order(("tiny",), "the rest"))
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(first.batch)
    states = [id(part.state) for part in plan._parts]
    assert [(part.group.backend, part.group.row_class, part.index) for part in plan._parts] == [
        ("tiny", "image", None),
        ("tiny", "decode", None),
        ("other", None, None),
    ]
    first.check(attn, plan, oracles[0])
    second.check(attn, attn.plan(second.batch, into=plan), oracles[1])
    assert [id(part.state) for part in plan._parts] == states
    parts = [part.state for part in plan._parts]
    first.run(attn, attn.plan(first.batch, into=plan), only="decode")
    assert plan._by_class["decode"][0].state is parts[1]  # planned once


def test_a_class_in_a_graph_keeps_its_part_when_a_row_joins_beside_it(
    install: Install, spec: AttentionSpec, oracle_of: Callable[[Step], Tensor]
) -> None:
    """Without the row, decode and prefill rows stand together and decode runs by a part of its own; with it they are split by class."""
    spec = spec.replace(mm_prefix="override_window")
    first, second = Step(spec, [5, 0, 17, 6], [5, 9, 20, 9]), Step(spec, [5, 6, 17, 6], [31, 9, 20, 9])
    first.batch.mm_spans = [[], [], [], [(4, 5)]]
    second.batch.mm_spans = [[], [(4, 5)], [], [(4, 5)]]
    oracle = oracle_of(second)
    two(install, Order(("other",), "images", when(row_class="image")), Order(("tiny",), "the rest"))
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(first.batch)
    first.run(attn, plan, only="decode")
    [own] = plan._by_class["decode"]
    own.captured = True
    attn.plan(second.batch, into=plan)
    [part] = plan._by_class["decode"]
    assert part.captured
    assert part.state is own.state
    out = torch.full((36, 4, 16), 7.0)
    second.run(attn, plan, only="decode", out=out)
    torch.testing.assert_close(out[:5].double(), oracle[:5], rtol=0, atol=2e-6)
    assert (out[5:] == 7).all()


def test_a_class_whose_first_run_failed_can_be_run_again(install: Install, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    bands = (Order(("other",), "long", when(row_class="decode"), kv_len=(8, None)), Order(("tiny",), "the rest"))
    two(install, *bands, Order(("tiny",), "any"))
    step = Step(spec, [1, 1, 17], [4, 30, 17])
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(step.batch)
    full = step.run(attn, plan)

    def fails(self: OtherBackend, *args: Any) -> Any:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(OtherBackend, "plan", fails)
        patch.setattr(plan, "_parts", [])  # so that every part of the class is made anew
        with pytest.raises(RuntimeError, match="boom"):
            step.run(attn, plan, only="decode")
    attn.plan(step.batch, into=plan)
    assert torch.equal(step.run(attn, plan)[:19], full[:19])
    assert torch.equal(step.run(attn, plan, only="decode", out=torch.zeros_like(full))[:2], full[:2])


def test_a_refresh_with_the_classes_in_other_places_says_where(install: Install, spec: AttentionSpec) -> None:
    two(install)
    attn = attnmux.Attention(spec, "cpu")
    plan = attn.plan(Step(spec, [1, 17], [4, 17]).batch)
    with pytest.raises(ValueError, match="into is a plan of 1 prefill, 1 decode, wanted row 0 to be prefill; make a new plan"):
        attn.plan(Step(spec, [17, 1], [17, 4]).batch, into=plan)


def test_a_backend_that_only_bounds_lead_to_is_warmed_up_and_has_its_workspace(install: Install, spec: AttentionSpec) -> None:
    warmed = []

    class Late(OtherBackend):
        option_names = ("tiles",)

        def workspace_bytes(self, limits: attnmux.Limits) -> int:
            return 1000

        def warmup(self, limits: attnmux.Limits) -> None:
            warmed.append(type(self).__name__)

    bounded = claim(lengths=OneOf("exact", "upper_bound"))
    install(registry(platforms=[lab("tiny>late")], backends=[info("tiny", claim()), info("late", bounded, implementation=Late)]))
    limits = attnmux.Limits(max_num_seqs=8, max_num_tokens=64, max_seq_len=64, max_query_len=32)
    with attnmux.config(backends={"late": {"tiles": 4}}):
        attn = attnmux.Attention(spec, "cpu", limits=limits)
    assert attn.backends == ("tiny", "late")
    exact = attn.plan(Step(spec, [1], [4]).batch)._parts[0].state["workspace"]
    attn.warmup("exact")
    assert warmed == []
    attn.warmup()
    assert warmed == ["Late"]
    batch = Step(spec, [1, 2], [4, 9]).batch
    batch.query_lens_cpu, batch.seq_lens_cpu, batch.lengths = [1, 2], [12, 10], "upper_bound"
    assert attn.plan(batch)._parts[0].state["workspace"].numel() == 1000
    assert attn.backend("late").options == {"tiles": 4}
    assert attn.plan(Step(spec, [1], [4]).batch)._parts[0].state["workspace"] is exact

"""A warm engine: steps compile nothing, wait for nothing, with ``out`` allocate nothing; lengths on the device, not bounds, decide the output."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import attnmux
from attnmux.testing import Row
from attnmux.testing.layout import make_batch, place_rows
from attnmux.testing.measure import SLACK, distance

triton = pytest.importorskip("triton")
launch = pytest.importorskip("attnmux.kernels.triton.launch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICE = "cuda"
LIMITS = attnmux.Limits(max_num_seqs=16, max_num_tokens=2048, max_seq_len=4096, max_query_len=300)
LONGEST = LIMITS.max_seq_len - 7  # a bound may be so much larger
QUERY_LENS = {"decode": (1, 1), "verify": (2, 16), "prefill": (17, LIMITS.max_query_len)}
KINDS = (*QUERY_LENS, "mixed")
PLAIN = attnmux.AttentionSpec(32, 8, 128, torch.bfloat16)
LSE = PLAIN.replace(return_lse=True)
SPECS = {
    "plain": PLAIN,
    "window, sinks": PLAIN.replace(num_q_heads=64, head_size=64, sliding_window=128, sinks=True),
    "spans": PLAIN.replace(num_q_heads=16, head_size=256, page_size=64, sliding_window=512, mm_prefix="override_window"),
    "reference window": PLAIN.replace(rswa_window=256),
    "fp8": PLAIN.replace(kv_dtype=torch.float8_e4m3fn, kv_scale="tensor"),
    "lse": LSE,
    "HND": PLAIN.replace(page_size=64, kv_layout="HND"),
    "packed": PLAIN.replace(page_size=None),
}


def random_rows(spec: attnmux.AttentionSpec, generator: random.Random, kind: str) -> list[Row]:
    """Some rows are padding, some have query tokens but no keys, some lengths are multiples of 16; up to three spans, with groups or without."""
    rows: list[Row] = []
    for _ in range(generator.randint(1, LIMITS.max_num_seqs)):
        q_len = generator.randint(*QUERY_LENS[generator.choice(KINDS[:3]) if kind == "mixed" else kind])
        if sum(row.q_len for row in rows) + q_len > LIMITS.max_num_tokens or generator.random() < 0.15:
            rows.append(Row(0, 0))
            continue
        kv_len = generator.randint(q_len, generator.choice((400, LONGEST)))
        kv_len = generator.choice((kv_len, max(q_len, kv_len // 16 * 16), 0 if generator.random() < 0.1 else kv_len))
        ends = sorted(generator.sample(range(kv_len + 1), 2 * generator.randint(0, min(3, (kv_len + 1) // 2)))) if spec.mm_prefix else []
        spans = tuple((start, end, *[generator.randint(0, 1)] * (len(rows) % 2)) for start, end in zip(ends[::2], ends[1::2], strict=True))
        rows.append(Row(q_len, kv_len, spans, prefix_len=generator.randint(0, 600)))
    return rows


def later(generator: random.Random, row: Row) -> Row:
    """The row in another step: longer or shorter, or padding. It keeps its class."""
    if generator.random() < 0.3:
        return Row(0, 0)
    return row if row.spans or not row.q_len else dataclasses.replace(row, kv_len=generator.randint(row.q_len, LONGEST))


class Engine:
    """One layer's tensors, the way engines hold them: q, k and v in one projection, scales and sinks of all layers in one tensor.

    Triton forgets the kernels that other tests had compiled (the disk does not).
    """

    def __init__(self, spec: attnmux.AttentionSpec, limits: attnmux.Limits = LIMITS, bounded: bool = True) -> None:
        for kernel in (launch.plan_step, launch.paged_attention, launch.combine, launch.write_cache):
            kernel.device_caches.clear()
        torch.manual_seed(0)
        self.spec, self.attention = spec, attnmux.Attention(spec, DEVICE, limits=limits if bounded else None, require="triton")
        keys, page, kv_heads = limits.max_num_seqs * (limits.max_seq_len + 64) + 512, spec.page_size, spec.num_kv_heads
        pool = (keys, kv_heads) if page is None else (keys // page, *((kv_heads, page) if spec.kv_layout == "HND" else (page, kv_heads)))
        self.caches = [torch.randn((*pool, spec.head_size), device=DEVICE, dtype=spec.dtype).to(spec.kv_dtype) for _ in range(2)]
        heads = (spec.num_q_heads, kv_heads, kv_heads)
        projection = torch.randn(limits.max_num_tokens, sum(heads), spec.head_size, device=DEVICE, dtype=spec.dtype)
        self.q, self.k, self.v = projection.split(heads, dim=1)
        self.out = torch.empty((limits.max_num_tokens, spec.num_q_heads, spec.head_size), device=DEVICE, dtype=spec.dtype)
        self.slots = torch.randperm(keys - 512, device=DEVICE)
        self.scales, self.sinks = torch.ones(5, device=DEVICE), torch.ones(3, spec.num_q_heads + 1, device=DEVICE)

    def layer(self, number: int) -> dict:
        """Per-layer inputs: numbers and tensors, tensors that start anywhere, sinks in either dtype."""
        sinks = self.sinks.to(self.spec.dtype if number % 2 else torch.float32)[number % 3, : self.spec.num_q_heads]
        scales = {"k_scale": self.scales[number % 5], "v_scale": 0.5 if number % 3 else self.scales[3]}
        return ({"sinks": sinks} if self.spec.sinks else {}) | (scales if self.spec.kv_scale else {})

    def batch(self, rows: list[Row], lengths: str = "exact", seed: int = 0) -> attnmux.Batch:
        return make_batch(self.spec, rows, place_rows(self.spec, rows, "shuffled", seed)[0], DEVICE, lengths, hide=False)

    def run(self, plan: attnmux.Plan, out: torch.Tensor | None = None, number: int = 0):
        tokens = plan.num_tokens if out is None else out.shape[0]
        return self.attention.run(self.q[:tokens], *self.caches, plan, out=out, **self.layer(number))

    def write(self, tokens: int, number: int) -> None:
        scales = {name: value for name, value in self.layer(number).items() if name != "sinks"}
        self.attention.write_kv(self.k[:tokens], self.v[:tokens], *self.caches, self.slots[number % 2 :][:tokens], **scales)


def bounded(batch: attnmux.Batch, page_size: int, longest: int = LIMITS.max_seq_len) -> attnmux.Batch:
    """The same with the limit as the bound of every row, and a table as wide."""
    table = torch.nn.functional.pad(batch.block_table, (0, longest // page_size - batch.block_table.shape[1]), value=-1)
    return dataclasses.replace(batch, lengths="upper_bound", seq_lens_cpu=[longest] * batch.num_seqs, block_table=table)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of kernels that are compiled meanwhile, or loaded from the disk: those that Triton does not hold in memory."""
    names: list[str] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = lambda *, fn, **rest: names.append(fn.name)  # None: go on and compile
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_cache_hook = before


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_compiled_after_warmup(name):
    engine, generator = Engine(SPECS[name]), random.Random(name)
    engine.attention.warmup()
    with compilations() as names:
        for i in range(1000 if name == "plain" else 60):
            kind, lengths = KINDS[i % 4], "upper_bound" if generator.random() < 0.3 else "exact"
            rows = random_rows(engine.spec, generator, kind)
            plan = engine.attention.plan(engine.batch(rows, lengths, i))
            engine.run(plan, number=i)
            again = engine.batch([later(generator, row) for row in rows], seed=i)
            # a bound does not say where a row's tokens are, so exact lengths may tell its spans otherwise
            plan = engine.attention.plan(again, into=None if engine.spec.mm_prefix and lengths == "upper_bound" else plan)
            engine.run(plan, engine.out, i + 1)
            engine.write(generator.randint(1, 64), i)
            assert not names, (i, kind, names)


def test_without_warmup_the_first_step_compiles():
    engine = Engine(PLAIN)
    with compilations() as names:
        engine.run(engine.attention.plan(engine.batch([Row(1, 900)])))
        engine.write(3, 0)
    assert set(names) == {"plan_step", "paged_attention", "combine", "write_cache"}


@pytest.mark.parametrize("lengths", ["exact", "upper_bound"])
@pytest.mark.parametrize("name", ["plain", "spans"])
def test_host_mirrors_spare_every_synchronisation(name, lengths, no_synchronisation):
    engine, generator = Engine(SPECS[name]), random.Random(1)
    for kind in KINDS:
        batch = engine.batch(random_rows(engine.spec, generator, kind), lengths)
        plan = engine.attention.plan(batch)
        engine.run(plan)
        with no_synchronisation():
            engine.run(engine.attention.plan(batch, into=plan), engine.out)
            engine.run(engine.attention.plan(batch))
    bare = dataclasses.replace(batch, lengths="exact", query_lens_cpu=None, seq_lens_cpu=None)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
        engine.attention.plan(bare)


@pytest.mark.parametrize("query_lens", [[1] * 16, [1, 5, 16], [17, 300, 60], [1, 60, 4]], ids=KINDS)
def test_nothing_is_allocated(query_lens):
    engine = Engine(PLAIN)
    batches = [engine.batch([Row(n, n + more) for n in query_lens], seed=more) for more in (0, 500, 3000)]
    plan = engine.attention.plan(batches[0])

    def allocations_of_a_round(out: torch.Tensor | None) -> int:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for batch in batches:
            engine.run(engine.attention.plan(batch, into=plan), out)
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before

    allocations_of_a_round(engine.out)
    assert allocations_of_a_round(engine.out) == 0
    assert allocations_of_a_round(None) >= len(batches)


@pytest.mark.parametrize("limits", [True, False], ids=["limits", "none"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 300}], ids=["plain", "window"])
def test_bounds_do_not_show_in_the_output(changes, limits):
    engine = Engine(LSE.replace(**changes), bounded=limits)
    exact = engine.batch([Row(1, 3000), Row(1, 17), Row(0, 0), Row(7, 700), Row(60, 900), Row(2, 0), Row(250, 250)])
    wide = bounded(exact, 16)
    want, want_lse = engine.run(engine.attention.plan(exact))
    out, lse = engine.run(engine.attention.plan(wide))
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and not bool(want.isnan().any())
    wide.seq_lens = torch.cat((exact.seq_lens[:1] // 2, exact.seq_lens[1:]))
    out, lse = engine.run(engine.attention.plan(wide))
    assert not torch.equal(out[0], want[0]) and not torch.equal(lse[0], want_lse[0])


@pytest.mark.parametrize("query_len", [1, 6])
@pytest.mark.parametrize("seqs", [1, 8, 11, 12, 13, 16, 36, 72])
def test_any_number_of_rows_is_right(seqs, query_len):
    engine, generator = Engine(LSE, dataclasses.replace(LIMITS, max_num_seqs=72)), random.Random(seqs)
    batch = engine.batch([Row(query_len, generator.randint(300, 2500)) for _ in range(seqs)])
    got = engine.run(engine.attention.plan(batch))
    q = engine.q[: batch.num_tokens]
    want = attnmux.reference_attention(q, *engine.caches, LSE, batch, compute_dtype=torch.float64)
    own = attnmux.reference_attention(q, *engine.caches, LSE, batch)
    for ours, theirs, truth in zip(got, own, want, strict=True):
        assert distance(ours, truth) <= 2 * distance(theirs, truth) + SLACK


def test_a_plan_inside_a_graph_reads_lengths_on_the_device():
    """One graph holds plan and run, one holds a run alone: when tensors change in place, the first follows and the second does not."""
    engine = Engine(PLAIN, attnmux.Limits(max_num_seqs=32, max_num_tokens=32, max_seq_len=LIMITS.max_seq_len, max_query_len=1))
    batch = bounded(engine.batch([Row(1, 5 + i) for i in range(32)]), 16)
    generator, attention, stale = random.Random(0), engine.attention, torch.empty_like(engine.out)
    stream, following, frozen = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # a capture may not wait for work of another stream: the plan belongs to the graph's
        plan, other = attention.plan(batch), attention.plan(batch)
        engine.run(plan, engine.out)
    with torch.cuda.graph(following, stream=stream):
        engine.run(attention.plan(batch, into=plan), engine.out)
    with torch.cuda.graph(frozen, stream=stream):
        engine.run(other, stale)
    with torch.cuda.stream(stream):
        for i in range(60):
            here = generator.sample(range(32), 32 if i % 3 == 0 else generator.randint(1, 6))  # the others are padding, and come back
            new = engine.batch([Row(1, generator.randint(1, LONGEST - 16)) if row in here else Row(0, 0) for row in range(32)], seed=i)
            batch.query_start_loc.copy_(new.query_start_loc)
            batch.seq_lens.copy_(new.seq_lens)
            batch.block_table[:, : new.block_table.shape[1]].copy_(new.block_table)
            engine.out.fill_(torch.nan)
            following.replay()
            frozen.replay()
            eager, n = engine.run(attention.plan(new)), new.num_tokens
            assert torch.equal(engine.out[:n], eager[:n]) and bool(engine.out[n:].isnan().all()), i
            assert not torch.equal(stale[:n], eager[:n]), i
    torch.cuda.synchronize()

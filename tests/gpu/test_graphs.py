"""A CUDA graph captured over short sequences and replayed over long ones, with changed tables and padding rows, equals eager."""

from __future__ import annotations

import random

import pytest
import torch

import attnmux
from attnmux.testing.measure import SLACK, distance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PAGE, PAGES, SEQS = 16, 4096, 16
SPECS = {
    "plain": {},
    "window, sinks": {"sliding_window": 700, "sinks": True},
    "reference window": {"rswa_window": 64},
    "fp8": {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "tensor"},
    "invariant": {"batch_invariant": True},
}


def step(spec, generator: random.Random, query_lens: list[int], longest: int) -> attnmux.Batch:
    """Rows with new lengths and pages; some are padding."""
    lens = [n and generator.randint(n, longest) for n in query_lens]
    pages = generator.sample(range(PAGES), sum(-(-n // PAGE) for n in lens))
    table = torch.full((SEQS, 512), -1, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(-(-length // PAGE)):
            table[row, column] = pages.pop()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    prefix = torch.tensor([generator.randint(0, 90) for _ in lens], dtype=torch.int32).cuda() if spec.rswa_window else None
    return attnmux.Batch(
        starts.cuda(), torch.tensor(lens, dtype=torch.int32).cuda(), table.cuda(), prefix_lens=prefix, query_lens_cpu=query_lens, seq_lens_cpu=lens
    )


def inputs(spec: attnmux.AttentionSpec, tokens: int = SEQS * 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    torch.manual_seed(0)
    q = torch.randn(tokens, spec.num_q_heads, spec.head_size, device="cuda", dtype=spec.dtype)
    k, v = (torch.randn(PAGES, PAGE, spec.num_kv_heads, spec.head_size, device="cuda", dtype=torch.float16).to(spec.kv_dtype) for _ in range(2))
    layer = {"sinks": torch.randn(spec.num_q_heads, device="cuda")} if spec.sinks else {}
    return q, k, v, layer | ({"k_scale": 0.7, "v_scale": torch.tensor(1.2, device="cuda")} if spec.kv_scale else {})


@pytest.mark.parametrize("name", SPECS)
def test_captured_short_replayed_long(name):
    spec = attnmux.AttentionSpec(8, 2, 64, torch.float16, page_size=PAGE, return_lse=False, **SPECS[name])
    limits = attnmux.Limits(max_num_seqs=SEQS, max_num_tokens=SEQS * 16, max_seq_len=512 * PAGE, max_query_len=16)
    attention = attnmux.Attention(spec, "cuda", limits=limits, require="triton")
    attention.warmup()
    q, k, v, layer = inputs(spec)
    out, eager = torch.empty_like(q), torch.empty_like(q)
    generator = random.Random(0)
    query_lens = [1] * 6 + [2, 16, 1, 7, 3, 1, 16, 5, 1, 4]
    plan = attention.plan(step(spec, generator, query_lens, 20))
    attention.run(q, k, v, plan, out=eager, **layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k, v, plan, out=out, **layer)
    for i in range(1000 if name == "plain" else 200):
        padding = generator.sample(range(SEQS), generator.randint(0, 6))
        longest = 60 if i % 5 else 4000
        batch = step(spec, generator, [0 if row in padding else n for row, n in enumerate(query_lens)], longest)
        attention.plan(batch, into=plan)
        out.fill_(torch.nan)
        graph.replay()
        attention.run(q, k, v, plan, out=eager, **layer)
        n = batch.num_tokens
        assert torch.equal(out[:n], eager[:n]), i
        assert bool(out[n:].isnan().all()), i
        if i % 190 == 0:
            want, _ = attnmux.reference_attention(q, k, v, spec, batch, compute_dtype=torch.float64, **layer)
            own, _ = attnmux.reference_attention(q, k, v, spec, batch, **layer)
            assert distance(out[:n], want[:n]) <= 2 * distance(own[:n], want[:n]) + SLACK


# At head size 128 a step whose rows fill the device has other tiles on Hopper: 1,585 query tokens of 32 heads do on 132 multiprocessors.
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "longest"), [(8, 2, 64, 100), (32, 8, 128, 2000)], ids=["short", "long"])
def test_prefill_is_captured_too(heads, kv_heads, head_size, longest):
    spec = attnmux.AttentionSpec(heads, kv_heads, head_size, torch.float16, page_size=PAGE)
    tokens = 2 * longest + 64
    limits = attnmux.Limits(max_num_seqs=SEQS, max_num_tokens=tokens, max_seq_len=512 * PAGE, max_query_len=longest)
    attention = attnmux.Attention(spec, "cuda", limits=limits, require="triton")
    q, k, v, _ = inputs(spec, tokens)
    out, eager = torch.empty_like(q), torch.empty_like(q)
    generator = random.Random(1)
    query_lens = [1, longest * 3 // 5, 1, longest, 20] + [1] * 11
    plan = attention.plan(step(spec, generator, query_lens, longest))
    attention.run(q, k, v, plan, out=eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k, v, plan, out=out)
    other = attnmux.Attention(spec, "cuda", require="triton")
    for i in range(20):
        most = longest if i % 2 else max(100, longest // 4)
        lens = [1, generator.randint(17, most), 0, generator.randint(17, most), 20] + [1] * 11
        batch = step(spec, generator, lens, 3000)
        attention.plan(batch, into=plan)
        out.fill_(torch.nan)
        graph.replay()
        attention.run(q, k, v, plan, out=eager)
        n = batch.num_tokens
        if longest == 100:  # else eager may run with other tiles than the graph holds
            assert torch.equal(out[:n], eager[:n]), i
        assert distance(out[:n], eager[:n]) < 2e-3, i
        assert bool(out[n:].isnan().all()), i
        assert distance(out[:n], other.run(q, k, v, other.plan(batch))[:n]) < 2e-3, i  # without limits items are other ones
    both = longest > 100 and torch.cuda.get_device_capability() == (9, 0)
    assert len(plan._parts[0].state.work) == (3 if both else 2)  # decode, and one tile for the others, or both


@pytest.mark.parametrize("name", ["plain", "reference window"])
def test_the_plan_is_captured_with_its_layers(name):
    """Lengths and tables change where they lie. The first layer begins while what the plan launched last may still run."""
    spec = attnmux.AttentionSpec(8, 2, 64, torch.float16, page_size=PAGE, **SPECS[name])
    limits = attnmux.Limits(max_num_seqs=SEQS, max_num_tokens=SEQS, max_seq_len=512 * PAGE, max_query_len=1)
    attention = attnmux.Attention(spec, "cuda", limits=limits, require="triton")
    attention.warmup()
    q, k, v, layer = inputs(spec)
    q = q[:SEQS]
    outs, eager = torch.empty((3, *q.shape), dtype=q.dtype, device="cuda"), torch.empty_like(q)
    generator = random.Random(2)
    held = step(spec, generator, [1] * SEQS, 4000)
    held.seq_lens_cpu, held.lengths = [4000] * SEQS, "upper_bound"
    plan = attention.plan(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.plan(held, into=plan)
        for out in outs:
            attention.run(q, k, v, plan, out=out, **layer)
    other = attnmux.Attention(spec, "cuda", require="triton")
    for i in range(300):
        batch = step(spec, generator, [1] * SEQS, 4000 if i % 3 else 200)
        for field in ("seq_lens", "block_table", "prefix_lens"):
            if getattr(held, field) is not None:
                getattr(held, field).copy_(getattr(batch, field))
        outs.fill_(torch.nan)
        graph.replay()
        other.run(q, k, v, other.plan(batch), out=eager, **layer)
        for out in outs:  # without limits items are other ones
            assert distance(out, eager) < 2e-3, i
            assert torch.equal(out, outs[0]), i

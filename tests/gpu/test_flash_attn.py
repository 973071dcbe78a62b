"""FlashAttention-3 and -4 where they run: the conformance kit, graphs, dirty memory behind every key tile, skewed batches, no synchronisation.

Run with ``-n``: FlashAttention-4 compiles a kernel in 5 to 10 seconds, and processes share what they compiled through a folder.
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when the library is imported
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path(tempfile.gettempdir()) / "attnmux-fa4-kernels"))

import attnmux
from attnmux.backends.flash_attn_3 import PAGED
from attnmux.testing import Row, make_case, parametrize_backend_checks
from attnmux.testing.kit import subject_of
from attnmux.testing.measure import SLACK, Answer, distance, expect_close, oracle

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
WHY_NOT = {name: subject_of(name, "cuda").stopped for name in ("flash_attn_3", "flash_attn_4")}
NAMES = [name for name, why in WHY_NOT.items() if not why]
if not NAMES:
    pytest.skip(str(WHY_NOT), allow_module_level=True)
BF16, FP16 = torch.bfloat16, torch.float16
SINK_DTYPES = (BF16, torch.float32)


@parametrize_backend_checks(*NAMES, device="cuda")
def test_conformance(check):
    check.run()


def attention(name: str, spec: attnmux.AttentionSpec, limits: attnmux.Limits | None = None) -> attnmux.Attention:
    return attnmux.Attention(spec, "cuda", limits=limits, require=name)


def answer(attn: attnmux.Attention, case, plan=None) -> Answer:
    out, lse = case.outputs()
    (plan or attn.plan(case.batch)).execute(case.q, case.k_cache, case.v_cache, out, lse, None, case.layer_args)
    return Answer(out, lse)


def holds(name: str, case) -> None:
    expect_close(case, answer(attention(name, case.spec), case), oracle(case))


TAILS = {"causal": {}, "window": {"sliding_window": 150}, "both ways": {"causal": False}, "radius": {"causal": False, "sliding_window": 70}}
PAGES = (None, 1, 16, 48, 64, 80, 96, 112, 128, 160, 192, 256)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("head_size", PAGED.head_size.values)
@pytest.mark.parametrize("name", NAMES)
def test_dirty_memory_behind_the_last_key(name, head_size, tail):
    """NaN behind a row's last key, in pages as long as a key tile and others, in rows long enough for every path of the kernels."""
    rows = (Row(200, 333), Row(1, 129), Row(16, 127), Row(150, 150), Row(0, 40), Row(1, 1), Row(3, 0), Row(5, 257))
    for page in PAGES:
        spec = attnmux.AttentionSpec(8, 2, head_size, BF16, page_size=page, **TAILS[tail])
        try:
            holds(name, make_case(spec, rows, device="cuda"))
        except Exception as error:
            raise AssertionError(f"page_size {page}: {error}") from error


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (10, 2), (14, 2), (64, 8), (64, 1), (71, 1), (128, 8)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_head_counts(name, heads):
    for sinks in (False, True):
        for dtype in SINK_DTYPES if sinks else (BF16,):
            spec = attnmux.AttentionSpec(*heads, 64, BF16, sinks=sinks, sliding_window=40 if sinks else None)
            case = make_case(spec, (Row(60, 100), Row(1, 300), Row(9, 9), Row(2, 0)), device="cuda")
            if sinks:
                case.layer["sinks"] = case.layer["sinks"].to(dtype)
            holds(name, case)


@pytest.mark.parametrize("window", [None, 128, 3000])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("name", NAMES)
def test_sinks_over_split_keys(name, head_size, window):
    """A sink is added once however keys are split, in every way that a backend adds it."""
    rows = (Row(1, 9000), Row(4, 5000), Row(16, 4100), Row(1, 3), Row(2, 0))
    for return_lse in (False, True):
        for dtype in SINK_DTYPES:
            spec = attnmux.AttentionSpec(16, 2, head_size, BF16, sinks=True, sliding_window=window, return_lse=return_lse)
            case = make_case(spec, rows, device="cuda")
            case.layer["sinks"] = (case.layer["sinks"] + 6).to(dtype)  # as much as thousands of keys weigh
            try:
                holds(name, case)
            except Exception as error:
                raise AssertionError(f"sinks in {dtype}, return_lse={return_lse}: {error}") from error


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", NAMES)
def test_a_skewed_batch(name, layout):
    rows = (Row(1, 40_000), *(Row(1, 20 + 3 * i) for i in range(31)))
    spec = attnmux.AttentionSpec(32, 8, 128, BF16, kv_layout=layout, return_lse=True)
    holds(name, make_case(spec, rows, device="cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_long_prefill_and_many_rows(name):
    spec = attnmux.AttentionSpec(16, 4, 128, BF16, return_lse=True)
    holds(name, make_case(spec, (Row(2000, 6000), Row(1, 5000), Row(700, 700)), device="cuda"))
    generator = random.Random(0)
    many = tuple(Row(n, n + generator.randint(0, 90)) for n in (generator.choice((0, 1, 1, 2)) for _ in range(1100)))
    holds(name, make_case(spec.replace(num_q_heads=4, num_kv_heads=2, head_size=64), many, device="cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_packed_keys(name):
    for rows in ((Row(2, 5), Row(1, 3)), (Row(40, 333), Row(1, 9), Row(3, 100))):
        for window in (None, 6):
            spec = attnmux.AttentionSpec(4, 2, 64, FP16, page_size=None, sliding_window=window, return_lse=True)
            holds(name, make_case(spec, rows, device="cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_unaligned_tensors(name):
    """Keys and values are never copied: refused by name. Queries and outputs are copied."""
    spec = attnmux.AttentionSpec(4, 2, 64, BF16)
    case = make_case(spec, device="cuda")
    attn = attention(name, spec)
    shifted = torch.zeros(case.k_cache.numel() + 1, dtype=BF16, device="cuda")[1:].view(case.k_cache.shape)
    with pytest.raises(ValueError, match="k_cache is at 2 bytes past"):
        attn.run(case.q, shifted, case.v_cache, attn.plan(case.batch))
    wide = torch.full((case.q.shape[0], 4, 67), torch.nan, dtype=BF16, device="cuda")
    wide[..., 1:65] = case.q
    out = torch.full_like(wide, torch.nan)[..., 3:67]
    attn.run(wide[..., 1:65], case.k_cache, case.v_cache, attn.plan(case.batch), out=out)
    expect_close(case, Answer(out, None), oracle(case))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name, no_synchronisation):
    for changes in ({}, {"sliding_window": 40, "sinks": True, "return_lse": True}, {"page_size": None}):
        spec = attnmux.AttentionSpec(8, 2, 64, BF16, **changes)
        case = make_case(spec, (Row(60, 100), Row(1, 300), Row(9, 9), Row(2, 0)), device="cuda")
        for limits in (None, attnmux.Limits(4, 80, 400, 60)):
            attn = attention(name, spec, limits)
            plan = attn.plan(case.batch)
            answer(attn, case, plan)
            torch.cuda.synchronize()
            with no_synchronisation():
                attn.plan(case.batch, into=plan)
                attn.run(case.q, case.k_cache, case.v_cache, plan, **case.layer)
                attn.run(case.q, case.k_cache, case.v_cache, attn.plan(case.batch), **case.layer)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_on_another_stream(name):
    """Made late on one stream, run on another, refreshed while the other may still read."""
    spec = attnmux.AttentionSpec(8, 2, 64, BF16, sliding_window=2000)
    attn = attention(name, spec, attnmux.Limits(2, 64, 8192, 16))
    cases = [make_case(spec, (Row(1, 6000 - i), Row(16, 4000 + i)), device="cuda", seed=i) for i in range(2)]
    wanted = [answer(attn, case) for case in cases]
    torch.cuda.synchronize()
    busy, side, plan = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream(), None
    for i in range(20):
        case, want = cases[i % 2], wanted[i % 2]
        with torch.cuda.stream(side):
            for _ in range(4):
                busy = (busy @ busy).clamp(-1, 1)
            plan = attn.plan(case.batch, into=plan)
        got = answer(attn, case, plan)
        assert distance(got.out[:17], want.out[:17]) <= 2e-2, i
        expect_close(case, got, oracle(case))


PAGE, POOL, SEQS = 16, 4096, 16
GRAPHS = {
    "plain": ({}, BF16),
    "head 128": ({"head_size": 128}, BF16),
    "window, bf16 sinks": ({"sliding_window": 700, "sinks": True}, BF16),
    "window, fp32 sinks, lse": ({"sliding_window": 700, "sinks": True, "return_lse": True}, torch.float32),
}


def step(generator: random.Random, query_lens: list[int], longest: int) -> attnmux.Batch:
    """Rows with new lengths and pages; some are padding."""
    lens = [n and generator.randint(n, longest) for n in query_lens]
    pages = generator.sample(range(POOL), sum(-(-n // PAGE) for n in lens))
    table = torch.full((SEQS, 256), -1, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(-(-length // PAGE)):
            table[row, column] = pages.pop()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().cuda()
    return attnmux.Batch(starts, torch.tensor(lens, dtype=torch.int32).cuda(), table.cuda(), query_lens_cpu=query_lens, seq_lens_cpu=lens)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", NAMES)
def test_captured_short_replayed_long(name, graph, kind):
    """Captured with few keys and one query token a row, replayed with thousands and up to 16 (prefill: 90), changed tables, padding rows."""
    changes, sink_dtype = GRAPHS[graph]
    spec = attnmux.AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": BF16, "page_size": PAGE, **changes})
    most = 16 if kind == "decode" else 90
    attn = attention(name, spec, attnmux.Limits(SEQS, SEQS * most, 256 * PAGE, most))
    torch.manual_seed(0)
    q = torch.randn(SEQS * most, 8, spec.head_size, device="cuda", dtype=BF16)
    k, v = (torch.randn(POOL, PAGE, 2, spec.head_size, device="cuda", dtype=BF16) for _ in range(2))
    layer = {"sinks": torch.randn(8, device="cuda").to(sink_dtype)} if spec.sinks else {}
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda") if spec.return_lse else None
    args = attnmux.dispatch.backend.LayerArgs(**layer)
    generator = random.Random(0)
    plan = attn.plan(step(generator, [1] * SEQS if kind == "decode" else [17, 18] * 4 + [1] * 8, 20))
    plan.execute(q, k, v, out, lse, None, args)
    torch.cuda.synchronize()
    held = torch.cuda.CUDAGraph()
    with torch.cuda.graph(held):
        plan.execute(q, k, v, out, lse, None, args)
    for i in range(24):
        lens = [generator.randint(1, 16) for _ in range(SEQS)]
        if kind == "prefill":
            lens[:8] = [generator.randint(17, most) for _ in range(8)]
        padding = generator.sample(range(SEQS), generator.randint(0, 6))
        batch = step(generator, [0 if row in padding else n for row, n in enumerate(lens)], 100 if i % 4 else 4000)
        attn.plan(batch, into=plan)
        out.fill_(torch.nan)
        if lse is not None:
            lse.fill_(torch.nan)
        held.replay()
        n = batch.num_tokens
        want, want_lse = attnmux.reference_attention(q, k, v, spec, batch, compute_dtype=torch.float64, **layer)
        own, own_lse = attnmux.reference_attention(q, k, v, spec, batch, **layer)
        rounding = torch.finfo(BF16).eps / 2 * float(want[:n].abs().max())
        assert distance(out[:n], want[:n]) <= 2 * max(distance(own[:n], want[:n]), rounding) + SLACK, i
        assert bool(out[n:].isnan().all()), i
        if lse is not None:
            assert distance(lse[:n], want_lse[:n]) <= 2 * distance(own_lse[:n], want_lse[:n]) + 1e-3, i
            assert bool(lse[n:].isnan().all()), i

"""FlashInfer where it runs: the conformance kit, graphs, spans, scales, skewed batches, streams, no synchronisation.

Its kernels are compiled at first use, ten source files a module, so the checks that run are those whose modules are in :data:`CORE`, or with
``FLASHINFER_TEST_TIER=full`` also in :data:`FULL`. The first process to come builds them all side by side (some minutes); the rest wait.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator

import pytest
import torch

import attnmux
from attnmux.backends._flashinfer_modules import Module, Options, module_for, reachable
from attnmux.dispatch.backend import LayerArgs
from attnmux.testing import Check, Row, make_case
from attnmux.testing.kit import backend_checks, subject_of
from attnmux.testing.layout import make_batch, place_rows
from attnmux.testing.measure import SLACK, Answer, distance, expect_close, oracle
from attnmux.testing.sampling import Subject, Variant, variants

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if why := subject_of("flashinfer", "cuda").stopped:
    pytest.skip(f"flashinfer does not run here: {why}", allow_module_level=True)

BF16 = torch.bfloat16
S64 = attnmux.AttentionSpec(8, 2, 64, BF16)
S128, S256 = S64.replace(head_size=128), S64.replace(head_size=256)
WINDOW, FP8 = {"sliding_window": 5}, {"kv_dtype": torch.float8_e4m3fn}
SPANS = {"mm_prefix": "override_window"}
HOPPER = subject_of("flashinfer", "cuda").device.arch == "sm90"


def distinct(*modules: Module | None) -> tuple[Module, ...]:
    return tuple(dict.fromkeys(module for module in modules if module is not None and (HOPPER or module.kernel == "fa2")))


CORE = distinct(
    module_for(S64, "fa2"),
    module_for(S64.replace(**WINDOW), "fa2"),
    module_for(S64, "fa3"),
    module_for(S64.replace(sinks=True), "fa2"),
    module_for(S64.replace(alibi="linear"), "fa2"),
    module_for(S64.replace(softcap=2.0), "fa2"),
    module_for(S64.replace(**FP8, kv_scale="tensor"), "fa2"),
    module_for(S64.replace(**SPANS), "ranges"),
    module_for(S64.replace(**SPANS), "families"),
    module_for(S128, "fa2"),
    module_for(S128, "fa3"),
    module_for(S256, "fa2"),
    module_for(S256.replace(**SPANS), "ranges"),
)
"""13 modules on Hopper, 11 elsewhere."""
FULL = distinct(
    *CORE,
    module_for(S64.replace(**WINDOW), "fa3"),
    module_for(S64.replace(mm_prefix="within_window"), "families"),
    module_for(S64.replace(**FP8), "fa2"),
    module_for(S64.replace(**FP8, kv_scale="tensor", sinks=True), "fa2"),
    module_for(S64.replace(kv_dtype=torch.float8_e5m2, kv_scale="tensor"), "fa2"),
    module_for(S64.replace(dtype=torch.float16), "fa2"),
    module_for(S64.replace(scale=-0.1), "fa2"),
    module_for(S64.replace(head_size=512), "fa2"),
    module_for(S64.replace(head_size=192, v_head_size=128), "fa2") if HOPPER else None,
    module_for(S256, "fa3"),
)
"""23 modules on Hopper. The one of head sizes 192 and 128 brings another, for pools of unlike strides."""
MODULES = FULL if os.environ.get("FLASHINFER_TEST_TIER") == "full" else CORE


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    from attnmux.backends._flashinfer_warmup import build

    os.environ.setdefault("MAX_JOBS", str(max(2, (os.cpu_count() or 2) // 6)))  # of each of so many builds
    build(MODULES)


def needed(subject: Subject, variant: Variant, check: str) -> set[Module]:
    """The modules that a check of a claimed spec loads. Rows of the kit are short but in its long ones; warm-up builds all."""
    if check.endswith("-limits"):
        return set(reachable(variant.spec, subject.device, Options()))
    text = {"fa2"} if set(variant.classes) & {"prefill", "decode"} else set()
    kinds = text | ({"fa3"} if check.endswith("-long") and text else set()) | ({"ranges", "families"} if "image" in variant.classes else set())
    able = {"fa2", "ranges", "families", *(m.kernel for m in reachable(variant.spec, subject.device, Options()))}
    return {module_for(variant.spec, kind) for kind in kinds & able}


def selected() -> Iterator[Check]:
    subject = subject_of("flashinfer", "cuda")
    labels = {variant.label: variant for variant in variants(subject)}
    for check in backend_checks("flashinfer", "cuda"):
        concern, _, rest = check.id.partition("/")
        variant = labels.get(max((label for label in labels if rest == label or rest.startswith(f"{label}-")), key=len, default=""))
        if variant is None or concern in ("declaration", "refusals") or needed(subject, variant, rest) <= set(MODULES):
            yield check


@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in selected()])
def test_conformance(check):
    check.run()


def attention(spec: attnmux.AttentionSpec, limits: attnmux.Limits | None = None) -> attnmux.Attention:
    return attnmux.Attention(spec, "cuda", limits=limits, require="flashinfer")


def answer(attn: attnmux.Attention, case, plan=None) -> Answer:
    out, lse = case.outputs()
    (plan or attn.plan(case.batch)).execute(case.q, case.k_cache, case.v_cache, out, lse, None, case.layer_args)
    return Answer(out, lse)


PAGE, PAGES, SEQS = 16, 4096, 16
ROUNDING = torch.finfo(BF16).eps / 2
CAPTURED = {
    "plain": S64,
    "window, sinks": S64.replace(sliding_window=700, sinks=True),
    "lse": S64.replace(return_lse=True),
    "sinks, lse": S64.replace(sinks=True, return_lse=True),
    "fp8": S64.replace(**FP8, kv_scale="tensor"),
    "D 128": S128,
}


def step(generator: random.Random, query_lens: list[int], longest: int) -> attnmux.Batch:
    """Rows with new lengths and pages; those without query tokens are padding."""
    lens = [n and generator.randint(n, longest) for n in query_lens]
    pages = generator.sample(range(PAGES), sum(-(-n // PAGE) for n in lens))
    table = torch.full((SEQS, 512), -1, dtype=torch.int32)
    for row, length in enumerate(lens):
        for column in range(-(-length // PAGE)):
            table[row, column] = pages.pop()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(lens, dtype=torch.int32)
    return attnmux.Batch(starts.cuda(), lengths.cuda(), table.cuda(), query_lens_cpu=query_lens, seq_lens_cpu=lens)


@pytest.mark.parametrize("query_lens", [[1] * SEQS, [1] * 6 + [2, 16, 1, 7, 3, 1, 16, 5, 1, 4]], ids=["one token", "ragged"])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_short_replayed_long(name, query_lens):
    spec = CAPTURED[name]
    limits = attnmux.Limits(max_num_seqs=SEQS, max_num_tokens=SEQS * 16, max_seq_len=512 * PAGE, max_query_len=16)
    attn, generator = attention(spec, limits), random.Random(0)
    torch.manual_seed(0)
    q = torch.randn(SEQS * 16, 8, spec.head_size, device="cuda", dtype=BF16)
    k, v = (torch.randn(PAGES, PAGE, 2, spec.head_size, device="cuda", dtype=torch.float16).to(spec.kv_dtype) for _ in range(2))
    layer = {"sinks": torch.randn(8, device="cuda")} if spec.sinks else {}
    layer |= {"k_scale": 0.7, "v_scale": torch.tensor(1.2, device="cuda")} if spec.kv_scale else {}
    out, eager = torch.empty_like(q), torch.empty_like(q)
    lse = torch.empty(q.shape[:2], device="cuda") if spec.return_lse else None
    first = [n if row % 3 else 1 for row, n in enumerate(query_lens)]  # fewer tokens than later steps have
    if max(first) == max(query_lens):
        plan = attn.plan(step(generator, first, 20))
    else:
        plan = attn.plan(step(generator, query_lens, 20))

    def run_captured() -> None:
        plan.execute(q, k, v, out, lse, None, LayerArgs(**layer))

    run_captured()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_captured()
    for i in range(100):
        padding = generator.sample(range(SEQS), generator.randint(0, 6))
        batch = step(generator, [0 if row in padding else n for row, n in enumerate(query_lens)], 60 if i % 5 else 4000)
        attn.plan(batch, into=plan)
        out.fill_(torch.nan)
        if lse is not None:
            lse.fill_(7.0)
        graph.replay()
        found = attn.run(q, k, v, attn.plan(batch), out=eager, **layer)
        n = batch.num_tokens
        assert torch.equal(out[:n], eager[:n]), i
        assert bool(out[n:].isnan().all()), i
        if lse is not None:
            assert distance(lse[:n], found[1][:n]) < 1e-5 and bool((lse[n:] == 7.0).all()), i
        if i % 33 == 0:
            want, _ = attnmux.reference_attention(q, k, v, spec, batch, compute_dtype=torch.float64, **layer)
            own, _ = attnmux.reference_attention(q, k, v, spec, batch, **layer)
            # a captured launch cuts every row, and FlashInfer keeps the outputs of parts in bf16: one rounding more, of no more than a value
            part = ROUNDING * float(v.float().abs().max()) * float(layer.get("v_scale", 1.0))
            assert distance(out[:n], want[:n]) <= 2 * distance(own[:n], want[:n]) + part + SLACK


def test_a_plan_in_a_graph_is_an_error():
    attn = attention(S64, attnmux.Limits(4, 16, 256, 4))
    case = make_case(S64, (Row(1, 60), Row(2, 30)), device="cuda")
    plan = attn.plan(case.batch)
    answer(attn, case, plan)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="a CUDA graph cannot hold a plan"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attn.plan(case.batch, into=plan)


SYNC = {
    "plain": S64,
    "window": S64.replace(**WINDOW),
    "sinks": S64.replace(sinks=True, return_lse=True),
    "fp8": S64.replace(**FP8, kv_scale="tensor"),
    "spans": S64.replace(**SPANS),
    "packed": S64.replace(page_size=None),
}
ROWS = (
    Row(1, 3000),
    Row(16, 41),
    Row(0, 9),
    Row(2, 0),
    Row(24, 40, spans=((2, 9), (20, 33))),
    Row(30, 30, spans=((2, 11, 0), (14, 25, 0))),
    Row(200, 500),
)


@pytest.mark.parametrize("limits", [False, True], ids=["no limits", "limits"])
@pytest.mark.parametrize("name", SYNC)
def test_host_mirrors_spare_every_synchronisation(name, limits, no_synchronisation):
    spec = SYNC[name]
    for rows in (ROWS, [row for row in ROWS if row.q_len <= 16]):
        case = make_case(spec, rows, device="cuda")
        most = attnmux.Limits(len(rows), case.batch.num_tokens, 4096, max(row.q_len for row in rows))
        attn = attention(spec, most if limits else None)
        plan = attn.plan(case.batch)
        answer(attn, case, plan)
        with no_synchronisation():
            again = attn.plan(case.batch, into=plan)
            answers = [answer(attn, case, again), answer(attn, case)]
        for found in answers:
            expect_close(case, found, oracle(case))


@pytest.mark.parametrize("spec", [S64, S256], ids=["D 64", "D 256"])
@pytest.mark.parametrize("group", [(), (0,)], ids=["alone", "grouped"])
def test_a_span_reaches_forward(spec, group):
    """A prefill of 300 tokens: the span's first token notices its last key, and does not without the span."""
    if group and spec is S256:
        pytest.skip("the module for spans that share sight at head size 256 is not among those built")
    spec = spec.replace(**SPANS)
    spans = ((100, 230, *group), *([(10, 20, *group)] if group else []))
    for marked in (spans, ()):
        case = make_case(spec, (Row(300, 300, spans=marked),), device="cuda")
        attn = attention(spec)
        before = answer(attn, case).out.clone()
        expect_close(case, answer(attn, case), oracle(case))
        with case.changed_keys([(0, 229)]):
            after = answer(attn, case).out
        noticed = (before[:300] != after[:300]).flatten(1).any(1)
        assert bool(noticed[100]) == bool(marked) and bool(noticed[229:].all()) and not bool(noticed[20:100].any())


@pytest.mark.parametrize("changes", [{}, {"sinks": True}, {"sliding_window": 3000}], ids=["plain", "sinks", "window"])
@pytest.mark.parametrize("limits", [False, True], ids=["no limits", "limits"])
def test_one_long_row_among_short_ones(changes, limits):
    spec = S64.replace(return_lse=True, **changes)
    generator = random.Random(0)
    rows = [Row(1, 40_000), *(Row(generator.randint(1, 3), generator.randint(3, 700)) for _ in range(31))]
    batch = make_batch(spec, rows, place_rows(spec, rows, "shuffled", 0)[0], "cuda", "exact")
    torch.manual_seed(0)
    q = torch.randn(batch.num_tokens, 8, 64, device="cuda", dtype=BF16)
    k, v = (torch.randn(place_rows(spec, rows, "shuffled", 0)[1], 16, 2, 64, device="cuda", dtype=BF16) for _ in range(2))
    layer = {"sinks": torch.randn(8, device="cuda")} if spec.sinks else {}
    attn = attention(spec, attnmux.Limits(32, batch.num_tokens, 40_000, 3) if limits else None)
    got = attn.run(q, k, v, attn.plan(batch), **layer)
    want = attnmux.reference_attention(q, k, v, spec, batch, compute_dtype=torch.float64, **layer)
    own = attnmux.reference_attention(q, k, v, spec, batch, **layer)
    for ours, theirs, truth in zip(got, own, want, strict=True):
        assert distance(ours, truth) <= 2 * max(distance(theirs, truth), 2**-9 * float(truth.abs().max())) + SLACK


def test_scales_may_be_numbers_or_tensors():
    spec = S64.replace(**FP8, kv_scale="tensor")
    case = make_case(spec, (Row(1, 600), Row(7, 50), Row(100, 300)), device="cuda")
    attn, found = attention(spec), []
    for form in (float, lambda x: torch.tensor(x, device="cuda"), lambda x: torch.tensor([9.0, x], device="cuda")[1]):
        case.layer = {"k_scale": form(0.7), "v_scale": form(1.3)}
        found.append(answer(attn, case).out)
    assert torch.equal(found[0][:108], found[1][:108]) and torch.equal(found[0][:108], found[2][:108])
    expect_close(case, Answer(found[0], None), oracle(case))
    case.layer = {"k_scale": 0.7, "v_scale": 2.6}
    assert distance(answer(attn, case).out[:108], 2 * found[0][:108]) < 0.05


@pytest.mark.parametrize("limits", [attnmux.Limits(8, 64, 8192, 16), None], ids=["limits", "none"])
def test_two_streams_share_no_scratch(limits):
    attn = attention(S64, limits)
    cases = [make_case(S64, (Row(1, 6000), Row(2, 4000), Row(1, 5000 + i)), device="cuda", seed=i) for i in range(2)]
    plans = [attn.plan(case.batch) for case in cases]
    alone = [answer(attn, case, plan).out.clone() for case, plan in zip(cases, plans, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, i in [(s, i) for i in range(2) for s in streams]:
            with torch.cuda.stream(stream):
                found.append((i, answer(attn, cases[i], plans[i]).out))
        found += [(i, answer(attn, cases[i], plans[i]).out) for i in range(2)]
        torch.cuda.synchronize()
        assert all(torch.equal(out[:4], alone[i][:4]) for i, out in found)


def test_plans_made_faster_than_they_run_keep_their_tables():
    """Each refresh fills a pinned buffer whose copy may still be waiting behind the queue."""
    attn = attention(S64, attnmux.Limits(4, 8, 8192, 1))
    cases = [make_case(S64, [Row(1, n) for n in (100 * i + 9, 7 + i, 4000 - 300 * i, 1 + i)], device="cuda", seed=i) for i in range(8)]
    want = [answer(attn, case).out.clone() for case in cases]
    torch.cuda.synchronize()
    busy, plan, found = torch.randn(4096, 4096, device="cuda"), None, []
    for case in cases:
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        plan = attn.plan(case.batch, into=plan)
        found.append(answer(attn, case, plan).out)
    torch.cuda.synchronize()
    assert all(torch.equal(a[:4], b[:4]) for a, b in zip(found, want, strict=True))


def test_pools_of_unlike_strides_and_strided_outputs():
    case = make_case(S64, (Row(1, 60), Row(80, 90)), device="cuda")
    wide = torch.full((*case.v_cache.shape[:-1], 128), torch.nan, dtype=BF16, device="cuda")
    wide[..., :64] = case.v_cache
    case.v_cache = wide[..., :64]
    attn = attention(S64)
    out = torch.full((*case.q.shape[:2], 128), torch.nan, dtype=BF16, device="cuda")[..., :64]
    attn.plan(case.batch).execute(case.q, case.k_cache, case.v_cache, out, None, None, case.layer_args)
    expect_close(case, Answer(out, None), oracle(case))


def test_warmup_builds_and_a_mixed_step_runs():
    spec = S64.replace(**SPANS)
    limits = attnmux.Limits(8, 512, 1024, 300)
    attn = attention(spec, limits)
    attn.warmup()
    rows = [dataclasses.replace(row, kv_len=min(row.kv_len, 900)) for row in ROWS]
    case = make_case(spec, rows, device="cuda")
    expect_close(case, answer(attn, case), oracle(case))

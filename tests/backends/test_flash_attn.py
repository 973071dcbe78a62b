"""The FlashAttention adapters: pure functions against brute force, and both of them over doubles of their kernels, which need a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
from pathlib import Path

import pytest
import torch

import attnmux
from attnmux.backends import flash_attn_3, flash_attn_4
from attnmux.backends._flash_attn_run import add_sinks, is_aligned, paged
from attnmux.backends._flash_attn_step import PACKED_PAGE, columns_for, longest_query, step_of
from attnmux.dispatch.device import Device
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.host import registry
from attnmux.dispatch.requirements import Toolchain
from attnmux.testing import Row, make_case
from attnmux.testing.measure import Answer, expect_close, oracle
from attnmux.testing.rows import mixed_rows
from attnmux.testing.sampling import Subject, variants

sys.path.insert(0, str(Path(__file__).parent))
import flash_attn_doubles as doubles

BF16 = torch.bfloat16
HOPPER = Device("cpu", "sm90", "", "cpu")
REAL = importlib.util.find_spec("flash_attn_3") is not None or importlib.util.find_spec("flash_attn") is not None
CALLS: list = []
LIBRARY = None if REAL else doubles.flash_attn_3(CALLS)
over_doubles = pytest.mark.skipif(REAL, reason="the libraries themselves are installed: tests/gpu runs them")


@pytest.fixture
def kernels(monkeypatch):
    """The doubles in the libraries' places, with torch on one thread: its calls are many and small."""
    CALLS.clear()
    doubles.install(monkeypatch, CALLS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield CALLS
    torch.set_num_threads(threads)


def backend(name: str, spec: attnmux.AttentionSpec, limits: attnmux.Limits | None = None):
    module = importlib.import_module(f"attnmux.backends.{name}_backend")
    found = getattr(module, {"flash_attn_3": "FlashAttn3Backend", "flash_attn_4": "FlashAttn4Backend"}[name])(spec, HOPPER, {})
    found.limits = limits
    return found


def answer(found, state, case) -> Answer:
    out, lse = case.outputs()
    found.run(case.q, case.k_cache, case.v_cache, state, out, lse, case.layer_args)
    return Answer(out, lse)


def limits_of(*cases) -> attnmux.Limits:
    batches = [case.batch for case in cases]
    longest = max(max(b.key_lens) for b in batches)
    return attnmux.Limits(batches[0].num_seqs, max(b.num_tokens for b in batches), longest, max(max(b.query_lens) for b in batches))


def claimed(module) -> list:
    (info,) = module.attnmux_backends()
    subject = Subject(info, resolve("cuda:sm90", registry().catalog, ()), Toolchain(), stopped="dry")
    return [pytest.param(info.name, variant, id=f"{info.name}-{variant.label}") for variant in variants(subject)]


@over_doubles
@pytest.mark.parametrize(("name", "variant"), [*claimed(flash_attn_3), *claimed(flash_attn_4)])
def test_every_claim(name, variant, kernels):
    """Dirty pools, -1 in unseen entries, strided views, empty rows, padding: without limits, within them, and refreshed."""
    cases = [make_case(variant.spec, mixed_rows(variant.spec, variant.classes), seed=seed, lengths=variant.lengths) for seed in (0, 1)]
    for limits in (None, limits_of(*cases)):
        found, state = backend(name, variant.spec, limits), None
        for case in cases:
            state = found.plan(case.batch, None, state)
            expect_close(case, answer(found, state, case), oracle(case))


SHAPES = [(q, q + more) for q in (0, 1, 2, 5, 16, 23) for more in (0, 1, 3, 15, 16, 40)] + [(3, 0)]


@pytest.mark.parametrize("page", [None, 1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 16, 33])
def test_the_table_holds_what_is_seen_and_nothing_else(page, window):
    """Against a loop over tokens: every key in a window is where the row's end says, and every page is one that some token sees."""
    generator = random.Random(0)
    spec = attnmux.AttentionSpec(2, 1, 64, BF16, page_size=page, sliding_window=window)
    case = make_case(spec, [Row(q, k) for q, k in generator.sample(SHAPES, len(SHAPES))])
    longest = longest_query(spec, case.batch, None)
    columns = columns_for(spec, max(case.batch.key_lens), longest)
    step, size = step_of(spec, case.batch, longest, columns), page or PACKED_PAGE
    assert step.table.shape[1] <= columns
    for i, row in enumerate(case.rows):
        held = int(step.lens[i])
        dropped = row.kv_len - held
        first = row.kv_len - row.q_len
        seen = {k for t in range(row.q_len) for k in range(row.kv_len) if k <= first + t and (window is None or first + t - k < window)}
        assert min(seen, default=dropped) >= dropped >= 0
        if row.q_len and page is not None:
            assert all(any(k // size == (dropped + j) // size for k in seen) for j in range(0, held, size)), "a page that nobody sees"
        for key in seen:
            entry = int(step.table[i, (key - dropped) // size])
            if page is None:
                assert entry + (key - dropped) % size == case.places[i][0] + key
                assert held > PACKED_PAGE or int(step.short[i, key - dropped]) == case.places[i][0] + key
            else:
                assert dropped % size == 0
                assert entry == case.places[i][key // size]


def test_packed_rows_in_any_order():
    spec = attnmux.AttentionSpec(2, 1, 64, BF16, page_size=None)
    case = make_case(spec, (Row(3, 20), Row(2, 7), Row(1, 33)))
    part = case.batch.take([2, 0])
    step = step_of(spec, part, 3, columns_for(spec, 33, 3))
    assert step.table[:, 0].tolist() == [case.places[2][0], case.places[0][0]]
    assert step.lens.tolist() == [33, 20]


def test_packed_keys_fewer_than_a_page():
    spec = attnmux.AttentionSpec(2, 1, 64, BF16, page_size=None)
    pool = torch.arange(40 * 64.0).to(BF16).view(40, 1, 64)
    view = paged("k_cache", pool, spec)
    assert view.shape == (25, PACKED_PAGE, 1, 64)
    assert view.data_ptr() == pool.data_ptr()
    assert torch.equal(view[7, 3], pool[10])
    assert paged("k_cache", pool[3:8], spec).shape == (5, 1, 1, 64)
    assert paged("k_cache", pool[:0], spec).shape == (1, 1, 1, 64)


def test_alignment():
    pool = torch.zeros(1 + 4 * 16 * 64, dtype=BF16)
    spec = attnmux.AttentionSpec(2, 1, 64, BF16)
    assert is_aligned(pool[:-1].view(4, 16, 1, 64))
    assert not is_aligned(pool[1:].view(4, 16, 1, 64))
    with pytest.raises(ValueError, match="k_cache is at 2 bytes past a multiple of 16"):
        paged("k_cache", pool[1:].view(4, 16, 1, 64), spec)


def test_sinks_by_log_sum_exp():
    torch.manual_seed(0)
    scores, values = torch.randn(3, 5, 9).double(), torch.randn(3, 9, 4).double()
    scores[:, 2] = -torch.inf
    sinks = torch.tensor([0.3, -torch.inf, 40.0])
    lse = torch.logsumexp(scores, -1).float()
    out = torch.where(lse[..., None].double() == -torch.inf, 0.0, torch.softmax(scores, -1) @ values).transpose(0, 1).contiguous()
    out[4] = torch.nan
    live = torch.arange(5) < 4
    found = add_sinks(out, lse, sinks, live)
    with_sink = torch.cat((scores, sinks.double()[:, None, None].expand(3, 5, 1)), -1)
    want = torch.softmax(with_sink, -1)[..., :-1].nan_to_num(0.0) @ values
    torch.testing.assert_close(out[:4], want.transpose(0, 1)[:4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), torch.logsumexp(with_sink, -1), rtol=1e-5, atol=1e-6)
    assert out[4].isnan().all()


@pytest.mark.parametrize("seed", range(3))
@over_doubles
def test_refreshed_with_longer_rows_and_padding(seed, kernels):
    """What a graph holds, tensors and sizes, stays: rows get longer, vanish and come back."""
    spec = attnmux.AttentionSpec(4, 2, 64, BF16, sliding_window=9, return_lse=True)
    generator = random.Random(seed)
    limits = attnmux.Limits(max_num_seqs=6, max_num_tokens=60, max_seq_len=80, max_query_len=40)
    found = backend("flash_attn_3", spec, limits)
    state, before = None, None
    for _ in range(6):
        q_lens = [generator.choice((0, 1, 3, 16)) for _ in range(6)]
        case = make_case(spec, [Row(n, generator.randint(n, 80)) for n in q_lens], seed=seed)
        state = found.plan(case.batch, None, state)
        fixed = [t.data_ptr() for t in state.tensors()], state.table.shape, state.max_query_len
        assert before in (None, fixed)
        before = fixed
        if case.batch.num_tokens:
            expect_close(case, answer(found, state, case), oracle(case))


@over_doubles
@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_4"])
def test_padding_tokens_are_left_alone(name, kernels):
    """Also what a graph was captured with: all of ``q``."""
    spec = attnmux.AttentionSpec(4, 2, 64, BF16, sinks=True, return_lse=True)
    case = make_case(spec)
    n = case.batch.num_tokens
    for limits in (None, limits_of(case)):
        found = backend(name, spec, limits)
        out, lse = torch.full((n + 3, 4, 64), 7.0, dtype=BF16), torch.full((n + 3, 4), 7.0)
        found.run(case.q, case.k_cache, case.v_cache, found.plan(case.batch, None, None), out, lse, case.layer_args)
        assert bool((out[n:] == 7).all()) and bool((lse[n:] == 7).all())
        assert not bool((out[:n] == 7).all())


@over_doubles
@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_4"])
def test_a_packed_pool_shorter_than_a_page(name, kernels):
    for limits in (None, attnmux.Limits(2, 8, 300, 8)):
        for window in (None, 2):
            case = make_case(attnmux.AttentionSpec(4, 2, 64, BF16, page_size=None, sliding_window=window), (Row(2, 5), Row(1, 3)))
            assert len(case.k_cache) < PACKED_PAGE
            found = backend(name, case.spec, limits)
            expect_close(case, answer(found, found.plan(case.batch, None, None), case), oracle(case))


@over_doubles
def test_which_sinks_the_kernel_adds(kernels):
    """FlashAttention-3 rounds sinks to bf16: others, and log-sum-exps, take the exact way."""
    for dtype, return_lse, own in ((BF16, False, True), (torch.float32, False, False), (torch.float16, False, False), (BF16, True, False)):
        spec = attnmux.AttentionSpec(4, 2, 64, BF16, sinks=True, return_lse=return_lse)
        case = make_case(spec)
        case.layer["sinks"] = case.layer["sinks"].to(dtype)
        found = backend("flash_attn_3", spec)
        expect_close(case, answer(found, found.plan(case.batch, None, None), case), oracle(case))
        assert (CALLS[-1].get("sinks") is not None) == own


@over_doubles
def test_strided_and_unaligned_queries(kernels):
    spec = attnmux.AttentionSpec(4, 2, 64, torch.float16)
    for name in ("flash_attn_3", "flash_attn_4"):
        case = make_case(spec)
        wide = torch.full((case.q.shape[0], 4, 67), torch.nan, dtype=spec.dtype)
        wide[..., 1:65] = case.q
        case.q = wide[..., 1:65]
        out = torch.full_like(wide, torch.nan)[..., 3:67]
        found = backend(name, spec)
        found.run(case.q, case.k_cache, case.v_cache, found.plan(case.batch, None, None), out, None, case.layer_args)
        expect_close(case, Answer(out, None), oracle(case))


@over_doubles
def test_flash_attn_4_warms_up_every_kernel(kernels):
    spec = attnmux.AttentionSpec(4, 2, 64, BF16, sinks=True, page_size=None)
    backend("flash_attn_4", spec).warmup(attnmux.Limits(300, 8192, 5000, 700))
    found = {(call["sinks"].dtype, call["page_table"].shape[0]) for call in CALLS}
    assert found == {(dtype, seqs) for dtype in (torch.float32, BF16) for seqs in (1, 257)}
    for changes in ({"page_size": 16}, {"page_size": None, "attn_type": "cross"}, {"kv_layout": "HND", "sliding_window": 9}):
        limits = attnmux.Limits(300, 8192, 40, 700)  # fewer keys than query tokens
        found = backend("flash_attn_4", attnmux.AttentionSpec(4, 2, 64, BF16, **changes), limits)
        found.warmup(limits)


@pytest.mark.parametrize("head_size", flash_attn_4.HOPPER.head_size.values)
def test_key_tiles(head_size):
    """Never as long as a page, never spilling, never longer than the library's own."""
    from attnmux.backends.flash_attn_4_backend import key_tile

    for own in (64, 80, 96, 112, 128, 144):
        if own < doubles.rows_a_pass(head_size):
            continue
        for page in (1, 16, 48, 64, 80, 96, 112, 128, 256):
            tile = key_tile(own, head_size, head_size, page)
            assert 0 <= tile <= own and tile != page
            assert tile % doubles.rows_a_pass(head_size) == 0
            assert tile or (own < 2 * doubles.rows_a_pass(head_size) and page == doubles.rows_a_pass(head_size))


@over_doubles
def test_flash_attn_4_asks_for_another_tile_where_its_own_is_wrong(kernels):
    for changes, tile in (({}, None), ({"page_size": 128}, (128, 112)), ({"head_size": 96, "causal": False}, (128, 128))):
        spec = attnmux.AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_size": 128, "dtype": BF16, **changes})
        case = make_case(spec)
        found = backend("flash_attn_4", spec)
        expect_close(case, answer(found, found.plan(case.batch, None, None), case), oracle(case))
        assert CALLS[-1]["tile_mn"] == tile


def test_what_a_build_leaves_out():
    from attnmux.backends.flash_attn_3_backend import lacks

    wheel = {f"FLASHATTENTION_DISABLE_{name}": True for name in ("BACKWARD", "SOFTCAP", "HDIM96", "SM8x")}
    small = {f"FLASHATTENTION_DISABLE_HDIM{size}": True for size in (192, 256)}
    spec = attnmux.AttentionSpec(4, 2, 96, torch.float16, sliding_window=9)
    assert not lacks(spec, wheel) and not lacks(spec, {})
    assert not lacks(spec, small)
    assert lacks(spec.replace(head_size=192), small) == "without head size 192"
    assert lacks(spec, {"FLASHATTENTION_DISABLE_LOCAL": True}) == "without sliding windows"
    assert lacks(spec, {"FLASHATTENTION_DISABLE_FP16": True}) == "without fp16"
    assert lacks(spec, {"FLASHATTENTION_DISABLE_PAGEDKV": True}).startswith("without paged rows")


@over_doubles
def test_another_operator_is_refused_by_name(kernels, monkeypatch):
    from attnmux.backends import flash_attn_3_backend as module

    monkeypatch.setattr(module, "USED", (*module.USED, "block_table"))
    with pytest.raises(ValueError, match="FlashAttention-3 is an operator without block_table"):
        backend("flash_attn_3", attnmux.AttentionSpec(4, 2, 64, BF16))


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4")
def test_flash_attn_4_has_what_is_used():
    library = importlib.import_module("flash_attn.cute.interface")
    names = inspect.signature(library._flash_attn_fwd).parameters
    double = inspect.signature(doubles.flash_attn_4([])._flash_attn_fwd).parameters
    assert set(double) <= set(names)
    for head_size in flash_attn_4.HOPPER.head_size.values:
        for causal, local in ((True, False), (False, False), (False, True), (True, True)):
            own = library._tile_size_fwd_sm90(head_size, head_size, causal, local)
            assert {"m_block_size", "n_block_size", "mma_pv_is_rs", "intra_wg_overlap"} <= set(vars(own))
            assert own.n_block_size >= doubles.rows_a_pass(head_size)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn_3") is None, reason="needs tokenspeed-fa3")
def test_flash_attn_3_has_what_is_used():
    try:
        importlib.import_module("flash_attn_interface")
    except (ImportError, OSError) as error:
        pytest.skip(f"does not load here: {error}")
    from attnmux.backends.flash_attn_3_backend import missing_arguments

    assert not missing_arguments(torch.ops.flash_attn_3.fwd)
    assert {"leftpad_k", "page_size", "num_splits"} <= {a.name for a in torch.ops.flash_attn_3.get_scheduler_metadata.default._schema.arguments}

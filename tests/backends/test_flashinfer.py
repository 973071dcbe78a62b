"""The pure parts of the FlashInfer backend against plain loops, and its calls against the package's signatures where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmux
from attnmux.backends import flashinfer as declaration
from attnmux.backends._flashinfer_modules import Module, Options, kernels_for, module_for, reachable, variant_of
from attnmux.backends._flashinfer_pages import key_families, page_indices, pages_of, shares_sight, token_ranges
from attnmux.backends._flashinfer_schedule import Scheduler, captured_tokens, ceil_div, query_tile
from attnmux.backends._flashinfer_variant import Variant
from attnmux.dispatch.device import Device
from attnmux.dispatch.rows import visible_keys
from attnmux.testing import Row, make_case
from attnmux.testing.cases import Case
from attnmux.testing.strategies import rows as any_row

BF16 = torch.bfloat16
PLAIN = attnmux.AttentionSpec(4, 2, 64, BF16)
HOPPER = Device("cuda", "sm90", "", "")
LIBRARY = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows of decoders with pages of any size or packed keys, windows or none, spans or none."""
    spec = PLAIN.replace(
        page_size=draw(st.sampled_from((1, 3, 8, 16, None))),
        sliding_window=draw(st.none() | st.integers(1, 40)),
        mm_prefix=draw(st.sampled_from((None, "override_window", "within_window"))),
    )
    return make_case(spec, draw(st.lists(any_row(spec), min_size=1, max_size=4)), seed=draw(st.integers(0, 99)))


def visible(case: Case, row: int) -> set[int]:
    return {key for lo, hi in visible_keys(case.spec, case.batch, row) for key in range(lo, hi)}


@settings(max_examples=150, deadline=None)
@given(cases())
def test_page_lists_hold_every_visible_key_and_no_page_that_nobody_sees(case: Case) -> None:
    pages = pages_of(case.spec, case.batch)
    found = page_indices(case.batch, pages).tolist()
    size = pages.size
    assert len(found) == pages.indptr[-1] and all(0 <= page < len(case.k_cache) for page in found)
    for row, places in enumerate(case.places):
        listed, seen, cut = found[pages.indptr[row] : pages.indptr[row + 1]], visible(case, row), pages.cut[row]
        if not case.rows[row].q_len:
            assert not listed
            continue
        columns = range(pages.first[row], pages.first[row] + len(listed))
        assert {key // size for key in seen} <= set(columns)
        assert not seen or min(seen) // size == pages.first[row]  # nothing is listed in front
        for column, page in zip(columns, listed, strict=True):
            shown = column if any(key // size == column for key in seen) else pages.first[row]
            assert page == (places[0] + shown if case.spec.page_size is None else places[shown])
        assert pages.lens[row] == case.rows[row].kv_len - cut if listed else pages.lens[row] == 0
        assert len(listed) == -(-pages.lens[row] // size)
        assert pages.last[row] == (pages.lens[row] - (len(listed) - 1) * size if listed else 0)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_ranges_and_families_say_who_sees_whom(case: Case) -> None:
    pages = pages_of(case.spec, case.batch)
    ranges, (families, first) = token_ranges(case.batch, pages).tolist(), key_families(case.batch, pages)
    token = 0
    for row, shape in enumerate(case.rows):
        spans = case.batch.spans(row)
        for q in range(shape.kv_len - shape.q_len, shape.kv_len):
            mine = [(start, end, group) for start, end, group in spans if start <= q < end] if shape.kv_len else []
            want = [max(mine[0][0] - pages.cut[row], 0), mine[0][1] - 1 - pages.cut[row]] if mine else [-1, -1]
            assert ranges[token] == want
            token += 1
            if not pages.lens[row] or q < pages.cut[row]:
                continue
            for key in range(pages.cut[row], shape.kv_len):
                theirs = [(start, end, group) for start, end, group in spans if start <= key < end]
                same = bool(mine and theirs and (mine == theirs or (mine[0][2] is not None and mine[0][2] == theirs[0][2])))
                at = [int(families[int(first[row]) + k - pages.cut[row]]) for k in (q, key)]
                assert (at[0] >= 0 and at[0] == at[1]) == same


def test_rows_without_keys_have_ranges_of_no_key() -> None:
    case = make_case(PLAIN.replace(mm_prefix="override_window"), [Row(3, 0, ((0, 2),)), Row(2, 5, ((3, 5),))])
    assert token_ranges(case.batch, pages_of(case.spec, case.batch)).tolist() == [[-1, -1]] * 3 + [[3, 4]] * 2


def test_which_spans_share_sight() -> None:
    assert not shares_sight([(0, 4, None), (5, 9, None)]) and not shares_sight([(0, 4, 1), (5, 9, 2)]) and shares_sight([(0, 4, 1), (5, 9, 1)])


def test_query_tiles_are_those_of_the_scheduler() -> None:
    assert [query_tile(n, 128) for n in (1, 16, 17, 64, 65, 9999)] == [16, 16, 64, 64, 128, 128]
    assert [query_tile(n, 256) for n in (16, 17, 9999)] == [16, 64, 64]
    assert [query_tile(n, 512) for n in (32, 33)] == [16, 32]


LLAMA = attnmux.AttentionSpec(32, 8, 128, BF16)


def parts(scheduler: Scheduler, lens: list[int], page: int, split: int | None) -> int:
    """Keys of the longest part, by the rules of the scheduler, of rows of one token."""
    counts = [ceil_div(n, page) for n in lens]
    if split is None:  # the smallest part for which all parts are on the device at once
        fits = [c for c in range(max(128 // page, 1), max(counts)) if sum(ceil_div(p, c) for p in counts) <= scheduler.slots]
        split = min(fits, default=max(counts))
    return min(split, max(counts)) * page


def test_skewed_batches_are_cut_and_even_ones_are_left_alone() -> None:
    scheduler = Scheduler(LLAMA, 132)
    generator = random.Random(0)
    for _ in range(200):
        lens = [generator.choice((40_000, generator.randint(1, 3000))) for _ in range(generator.randint(1, 64))]
        found = scheduler.cut([1] * len(lens), [ceil_div(n, 16) for n in lens], 16, -1)
        before = parts(scheduler, lens, 16, None)
        if found is None:
            assert before <= 2 * max(256, ceil_div(sum(ceil_div(n, 16) for n in lens), scheduler.slots) * 16)
        else:
            assert 2 * parts(scheduler, lens, 16, found[0]) < before
    assert scheduler.cut([1] * 32, [64] * 32, 16, -1) is None
    assert scheduler.cut([], [], 16, -1) is None
    assert scheduler.cut([1] * 32, [2500] + [90] * 31, 16, 127) is None  # a window bounds every row


def test_captured_scratch_holds_every_shape_within_limits() -> None:
    for seqs, tokens, longest, spec in itertools.product((1, 7, 64), (64, 200), (1, 3, 16, 400), (LLAMA, LLAMA.replace(head_size=256), PLAIN)):
        scheduler, limits = Scheduler(spec, 132), attnmux.Limits(seqs, tokens, 4096, longest)
        most = scheduler.captured_scratch(limits)
        for n, q in itertools.product(range(1, seqs + 1), range(1, min(longest, 16) + 1)):
            assert scheduler.scratch(*scheduler.captured_tiles(n, captured_tokens(n, q, limits))) <= most


def test_which_module_runs_which_rows() -> None:
    assert variant_of(PLAIN) == variant_of(PLAIN.replace(sliding_window=5, kv_dtype=torch.float8_e5m2)) == Variant()
    spans = PLAIN.replace(mm_prefix="within_window", sliding_window=4)
    assert [m.kind for m in reachable(spans, HOPPER, Options())] == ["stock", "stock", "ranges", "variant"]
    assert [m.kernel for m in reachable(spans, HOPPER, Options())] == ["fa2", "fa3", "fa2", "fa2"]
    assert [m.kernel for m in reachable(PLAIN, HOPPER, Options(kernel="fa2"))] == ["fa2"]
    assert module_for(spans, "families").variant == Variant(families=True, within=True)
    assert module_for(spans.replace(scale=-0.1), "ranges").variant == Variant(families=True, within=True, negative=True)
    fp8 = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": "tensor"}
    assert module_for(PLAIN.replace(sinks=True, **fp8), "fa2").variant == Variant(sinks=True, scales=True)
    for changes in ({"softcap": 3.0}, {"sinks": True}, {"alibi": "linear"}, {"scale": -1.0}, fp8, {"causal": False}, {"head_size": 512}):
        assert "fa3" not in kernels_for(PLAIN.replace(**changes), HOPPER), changes
    assert kernels_for(PLAIN, Device("cuda", "sm80", "", "")) == ("fa2",)
    hnd = PLAIN.replace(kv_layout="HND", head_size=128)
    assert kernels_for(hnd, Device("cuda", "sm100", "", "")) == ("fa2", "trtllm-gen", "cudnn")
    assert kernels_for(hnd.replace(sinks=True), Device("cuda", "sm103", "", "")) == ("fa2", "trtllm-gen")


def test_module_names_tell_modules_apart() -> None:
    """FlashInfer takes a name that it has built for the same module, whatever is asked of it: 0.7.2 does so with its sinks."""
    flags = [
        Variant(**dict(zip(("softcap", "alibi", "sinks", "scales", "families"), bits, strict=True)))
        for bits in itertools.product((False, True), repeat=5)
    ]
    modules = {
        Module("variant", "fa2", dtype, kv, size, size, variant=variant)
        for dtype, kv, size, variant in itertools.product((BF16, torch.float16), (BF16, torch.float8_e4m3fn), (64, 128), flags)
    }
    assert len({module.jit_args()[0] for module in modules}) == len(modules)
    assert len({variant.source for variant in flags}) == len(flags)


def test_sources_name_what_they_are_given() -> None:
    for bits in itertools.product((False, True), repeat=7):
        variant = Variant(*bits)
        for name, _ in variant.tensors:
            assert f"params.{name}[" in variant.source
        for name in variant.scalars:
            assert f"params.{name})" in variant.source
        assert variant.source.count("{") == variant.source.count("}")


class TestBuildTools:
    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("FLASHINFER_NVCC", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.2")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def test_missing_tools_are_reasons(self) -> None:
        reasons = [tool.judge(tool.probe()) for tool in declaration.COMPILER]
        assert [str(reason) for reason in reasons] == [
            "needs the program nvcc: not on the path, and no FlashInfer module is built",
            "needs the program ninja: not on the path",
        ]

    def test_tools_are_found_where_flashinfer_looks(self, tmp_path: Path) -> None:
        nvcc, ninja = declaration.COMPILER
        (tmp_path / "bin").mkdir()
        for path in (tmp_path / "bin" / "nvcc", tmp_path / "ninja"):
            path.touch(0o755)
        assert nvcc.probe() == str(tmp_path / "bin" / "nvcc") and ninja.probe() == str(tmp_path / "ninja")

    def test_built_modules_do_without_nvcc_but_not_without_ninja(self, tmp_path: Path) -> None:
        """FlashInfer has ninja check that a module compiled here is current, each time it loads it."""
        nvcc, ninja = declaration.COMPILER
        built = tmp_path / ".cache/flashinfer/0.7.2/90a/cached_ops/batch_prefill_x"
        built.mkdir(parents=True)
        assert nvcc.probe() is None
        (built / "batch_prefill_x.so").touch()
        assert nvcc.probe() and ninja.probe() is None

    def test_a_package_of_built_modules_does_without_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flashinfer_jit_cache" or None)
        assert all(tool.judge(tool.probe()) is None for tool in declaration.COMPILER)


def accepts(function: Any, *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)


PLANNED = (
    "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size",
    "head_dim_vo", "causal", "pos_encoding_mode", "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "q_data_type",
    "kv_data_type", "o_data_type", "non_blocking", "disable_split_kv", "fixed_split_size",
)  # fmt: skip


@LIBRARY
def test_the_installed_package_takes_our_arguments() -> None:
    library: Any = importlib.import_module("flashinfer")
    stock, spans = library.BatchPrefillWithPagedKVCacheWrapper, library.BatchPrefillWithCausalBidirectionalRangesWrapper
    buffers = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf", "kv_layout", "use_cuda_graph")
    assert accepts(stock.__init__, *buffers, "backend", "jit_args", "jit_kwargs", "variant_owns_mask")
    assert accepts(spans.__init__, *buffers, "q_data_type", "kv_data_type", "o_data_type", "head_dim_qk", "head_dim_vo")
    assert accepts(stock.plan, *PLANNED) and accepts(spans.plan, *PLANNED)
    assert accepts(stock.run, "out", "lse", "return_lse", "lse_base", "enable_pdl") and accepts(spans.run, "out", "lse", "return_lse", "enable_pdl")
    assert list(inspect.signature(spans.run).parameters)[3:6] == ["bidirectional_ranges", "causal_window_left", "range_window_left"]
    for name in ("_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_max_total_num_rows"):
        assert f"self.{name}" in inspect.getsource(stock)
    make = importlib.import_module("flashinfer.jit.attention.modules").gen_customize_batch_prefill_module
    module = module_for(PLAIN.replace(sinks=True), "fa2")
    inspect.signature(make).bind(module.kernel, *module.jit_args(), **module.jit_kwargs())
    both = ("workspace_buffer", "block_tables", "seq_lens", "bmm1_scale", "bmm2_scale", "window_left", "out", "sinks", "kv_layout", "backend")
    decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    context = importlib.import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
    assert accepts(decode, *both, "max_seq_len", "q_len_per_req", "max_q_len", "cum_seq_lens_q")
    assert accepts(context, *both, "max_q_len", "max_kv_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv", "causal")


@LIBRARY
def test_the_installed_package_calls_the_hooks_that_variants_have() -> None:
    library = Path(importlib.import_module("flashinfer").__file__ or "").parent / "data" / "include" / "flashinfer" / "attention"
    template, hooks = (library / "prefill.cuh").read_text(), (library / "variant_helper.cuh").read_text()
    for hook in ("LogitsTransform(params, logits, batch_idx", "LogitsMask(params, batch_idx", "update_m_d(params, kv_tile_idx", "OutputTransform("):
        assert f"variant.{hook}" in template
    for macro in ("LOGITS_TRANSFORM", "LOGITS_MASK", "M_D_UPDATE", "OUTPUT_TRANSFORM"):
        assert f"#define REGISTER_{macro}" in hooks

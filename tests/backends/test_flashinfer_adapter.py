"""The adapter's own work, from a batch to what FlashInfer is given, without FlashInfer and without a GPU.

``Wrapper`` below stands in for FlashInfer's wrappers, which run on CUDA devices only. It computes in float64 what they document from what
they are planned with and handed, and multiplies every listed value by its weight, so that a page that must not be listed shows as NaN.
"""

from __future__ import annotations

import gc
import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import attnmux
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.device import Device
from attnmux.testing import Row, make_case
from attnmux.testing.cases import Case
from attnmux.testing.kit import subject_of
from attnmux.testing.measure import Answer, expect_close, oracle
from attnmux.testing.numerics import case_for
from attnmux.testing.sampling import variants

MODULES = ("_flashinfer_lane", "_flashinfer_launch", "_flashinfer_blackwell", "_flashinfer_warmup", "flashinfer_backend")
BF16 = torch.bfloat16
PLAIN = attnmux.AttentionSpec(4, 2, 64, BF16)


class Event:
    def record(self, stream: Any = None) -> None:
        self.done = False

    def query(self) -> bool:
        return getattr(self, "done", True)


class Stream:
    cuda_stream = 0

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Event:
        return Event()


class Here(Device):
    """An H200 by name whose tensors live on the CPU."""

    @property
    def torch_device(self) -> str:
        return "cpu"


class Wrapper:
    """FlashInfer's paged prefill wrapper, and by ``ranges`` its subclass for spans."""

    ranges = False
    made: ClassVar[list[Wrapper]] = []

    def __init__(self, scratch: Tensor, *, kv_layout: str, use_cuda_graph: bool, backend: str = "fa2", jit_args: Any = None, **rest: Any) -> None:
        self._float_workspace_buffer, self._int_workspace_buffer = scratch, torch.empty(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._max_total_num_rows: int | None = None
        self.kv_layout, self.graph, self.backend, self.rest = kv_layout, use_cuda_graph, backend, rest
        self.names = (list(jit_args[7]), list(jit_args[9])) if jit_args else ([], [])
        self.plans: list[dict[str, Any]] = []
        self.made.append(self)

    def plan(self, **given: Any) -> None:
        assert all(given[name].device.type == "cpu" for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"))
        for name in ("q_data_type", "kv_data_type", "o_data_type", "causal", "window_left", "sm_scale", "logits_soft_cap", "pos_encoding_mode"):
            assert name in given  # none of these is FlashInfer's to choose
        assert given["paged_kv_indices"].dtype == torch.int32 and len(given["paged_kv_indices"]) == given["paged_kv_indptr"][-1]
        assert given["logits_soft_cap"] == 0.0 and self._int_workspace_buffer.numel() == self._pin_memory_int_workspace_buffer.numel() > 0
        if self.ranges or self.rest.get("variant_owns_mask"):
            assert not given["causal"] and given["window_left"] == -1
        if self.graph:
            assert "fixed_split_size" not in given and len(given["qo_indptr"]) == len(self.rest["qo_indptr_buf"])
            assert self._max_total_num_rows is not None and given["qo_indptr"][-1] <= self._max_total_num_rows
            self.rest["paged_kv_indices_buf"][: len(given["paged_kv_indices"])] = given["paged_kv_indices"]
        self.plans.append(given)

    def run(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        *extra: Any,
        out: Tensor,
        enable_pdl: bool | None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
    ) -> None:
        g = self.plans[-1]
        assert len(q) == g["qo_indptr"][-1] and q.dtype == g["q_data_type"] and out.is_contiguous() and lse_base == "log2"
        assert return_lse == (lse is not None) and (enable_pdl is False) == ("amx_k_scale" in self.names[0])
        if self.backend == "fa3":
            assert caches[0].stride() == caches[1].stride()
        self.extra = dict(zip([*self.names[0], *self.names[1]], extra, strict=True)) if self.names[0] or self.names[1] else {}
        if self.ranges:
            self.extra = dict(zip(("ranges", "causal_left", "range_left"), extra, strict=True))
        for row in range(len(g["qo_indptr"]) - 1):
            first, last = int(g["qo_indptr"][row]), int(g["qo_indptr"][row + 1])
            k, v = (self._gathered(cache, row) for cache in caches)
            out[first:last], sums = self._row(q[first:last].double(), k, v, row, first)
            if lse is not None:
                lse[first:last] = sums / math.log(2)

    def _gathered(self, cache: Tensor, row: int) -> Tensor:
        g = self.plans[-1]
        ids = g["paged_kv_indices"][int(g["paged_kv_indptr"][row]) : int(g["paged_kv_indptr"][row + 1])].long()
        assert bool((ids >= 0).all()), "a page that nobody may see is listed"
        nhd = cache.transpose(1, 2) if self.kv_layout == "HND" else cache
        length = max(len(ids) - 1, 0) * g["page_size"] + int(g["paged_kv_last_page_len"][row])
        return nhd[ids].double().flatten(0, 1)[:length].repeat_interleave(g["num_qo_heads"] // g["num_kv_heads"], 1)

    def _row(self, q: Tensor, k: Tensor, v: Tensor, row: int, first: int) -> tuple[Tensor, Tensor]:
        g, x = self.plans[-1], self.extra
        scale = x.get("amx_scale", g["sm_scale"]) * (x["amx_k_scale"].double() if "amx_k_scale" in x else 1.0)
        score = torch.einsum("qhd,khd->hqk", q, k) * scale
        score = x["amx_cap"] * torch.tanh(score / x["amx_cap"]) if "amx_cap" in x else score
        position = torch.arange(len(q))[:, None] + len(k) - len(q)
        key = torch.arange(len(k))
        if "amx_slopes" in x:
            score = score - x["amx_slopes"].double()[:, None, None] * (position - key).abs()
        score = score.masked_fill(~self._mask(position, key, row, first), -torch.inf)
        if "amx_sinks" in x:
            score = torch.cat((score, x["amx_sinks"].double()[:, None, None].expand(-1, len(q), 1)), -1)
        sums = score.logsumexp(-1)
        weights = (score - sums[..., None]).exp().nan_to_num(nan=0.0)[..., : len(k)]
        out = torch.einsum("hqk,khd->qhd", weights, v) * (x["amx_v_scale"].double() if "amx_v_scale" in x else 1.0)
        return out.to(g["o_data_type"]), sums.T.float()

    def _mask(self, position: Tensor, key: Tensor, row: int, first: int) -> Tensor:
        g, x = self.plans[-1], self.extra
        if self.ranges:
            ranges = x["ranges"][first : first + len(position)]
            near = (x["causal_left"] < 0) | (position - key <= x["causal_left"])
            inside = (key >= ranges[:, :1]) & (key <= ranges[:, 1:]) & ((x["range_left"] <= 0) | (position - key < x["range_left"]))
            return ((key <= position) & near) | inside
        if "amx_family" in x:
            window = int(x["amx_window"])
            near = (window < 0) | (position - key <= window)
            family = x["amx_family"][int(x["amx_first_key"][row]) :][: len(key)]
            same = (family[position] >= 0) & (family[position] == family[key]) if len(key) else torch.zeros(len(position), 0, dtype=torch.bool)
            return ((key <= position) & near) | (same & near if self.rest["within"] else same)
        left = g["window_left"]
        return ((key <= position) | (not g["causal"])) & ((left < 0) | (position - key <= left))


class RangesWrapper(Wrapper):
    ranges = True

    def __init__(self, scratch: Tensor, *, q_data_type: Any, kv_data_type: Any, o_data_type: Any, head_dim_qk: int, head_dim_vo: int, **rest: Any):
        super().__init__(scratch, **rest)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The adapter over the double."""
    fake = ModuleType("flashinfer")
    fake.__version__ = "0.7.2.double"  # type: ignore[attr-defined]
    fake.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    fake.BatchPrefillWithCausalBidirectionalRangesWrapper = RangesWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"attnmux.backends.{name}", raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    lane = importlib.import_module("attnmux.backends._flashinfer_lane")
    monkeypatch.setattr(lane, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    Wrapper.made = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # calls are many and small
    yield SimpleNamespace(backend=importlib.import_module("attnmux.backends.flashinfer_backend").FlashInferBackend, lane=lane)
    torch.set_num_threads(threads)
    for name in MODULES:
        sys.modules.pop(f"attnmux.backends.{name}", None)


def backend_for(
    library: SimpleNamespace, spec: attnmux.AttentionSpec, limits: attnmux.Limits | None = None, arch: str = "sm90", **options: Any
) -> Any:
    backend = library.backend(spec, Here("cuda", arch, "", "", True, 0), options)
    backend.limits = limits
    return backend


def planned(backend: Any, case: Case, previous: Any = None) -> Any:
    size = backend.plan_workspace_bytes(case.batch) if backend.limits is None else backend.workspace_bytes(backend.limits)
    state = backend.plan(case.batch, torch.empty(size, dtype=torch.uint8), previous)
    for launch in getattr(state, "launches", ()):
        launch.lane.wrapper.rest["within"] = case.spec.mm_prefix == "within_window"
    return state


def computed(backend: Any, case: Case, state: Any) -> Answer:
    out, lse = case.outputs()
    backend.run(case.q, case.k_cache, case.v_cache, state, out, lse, case.layer_args)
    return Answer(out, lse)


def all_claimed() -> list[Any]:
    subject = subject_of("flashinfer", "cuda:sm90", quick=True)
    return [pytest.param(variant, id=variant.label) for variant in variants(subject)]


@pytest.mark.parametrize("limits", [False, True], ids=["no-limits", "limits"])
@pytest.mark.parametrize("variant", all_claimed())
def test_every_claim_is_planned_right(variant: Any, limits: bool, library: SimpleNamespace) -> None:
    """What FlashInfer is told of pages, masks, scales and positions is what the semantics say."""
    cases = [case_for(SimpleNamespace(device=Here("cuda", "sm90", "", "", True), seed=seed), variant) for seed in (0, 1)]  # type: ignore[arg-type]
    batch = cases[0].batch
    most = attnmux.Limits(batch.num_seqs, batch.num_tokens, max(batch.key_lens), max(batch.query_lens)) if limits else None
    backend, previous = backend_for(library, variant.spec, most), None
    for case in cases:
        previous = planned(backend, case, previous)
        expect_close(case, computed(backend, case, previous), oracle(case))


def test_text_rows_pay_for_no_span_and_long_rows_go_to_fa3(library: SimpleNamespace) -> None:
    spec = PLAIN.replace(mm_prefix="override_window", sliding_window=20)
    rows = (Row(1, 60), Row(3, 30), Row(80, 90), Row(40, 64, spans=((30, 50),)), Row(20, 50, spans=((1, 5, 0), (32, 40, 0))), Row(0, 9))
    case = make_case(spec, rows)
    backend = backend_for(library, spec)
    state = planned(backend, case)
    found = [(launch.lane.module.kernel, launch.lane.module.kind, launch.tokens) for launch in state.launches]
    assert found == [("fa2", "stock", 4), ("fa3", "stock", 80), ("fa2", "ranges", 40), ("fa2", "variant", 20)]
    assert [launch.slice for launch in state.launches] == [(0, 4), (4, 84), (84, 124), (124, 144)]
    expect_close(case, computed(backend, case, state), oracle(case))


def test_rows_that_stand_apart_are_gathered_and_put_back(library: SimpleNamespace) -> None:
    spec = PLAIN.replace(mm_prefix="within_window", sliding_window=20, return_lse=True)
    rows = (Row(30, 64, spans=((40, 50),)), Row(2, 30), Row(80, 90), Row(40, 64, spans=((30, 50),)), Row(70, 70), Row(1, 5))
    case = make_case(spec, rows)
    backend = backend_for(library, spec)
    state = planned(backend, case)
    assert {launch.lane.module.kernel for launch in state.launches} == {"fa2"}  # rows apart are not copied for fa3
    assert all(launch.index is not None for launch in state.launches)
    expect_close(case, computed(backend, case, state), oracle(case))


def test_pools_of_unlike_strides_leave_fa3(library: SimpleNamespace) -> None:
    case = make_case(PLAIN, (Row(80, 90),))
    wide = torch.full((*case.v_cache.shape[:-1], 128), torch.nan, dtype=BF16)
    wide[..., :64] = case.v_cache
    case.v_cache = wide[..., :64]
    backend = backend_for(library, PLAIN)
    state = planned(backend, case)
    for _ in range(2):
        expect_close(case, computed(backend, case, state), oracle(case))
    assert [w.backend for w in Wrapper.made] == ["fa3", "fa2"]


def test_a_refreshed_plan_keeps_its_lane_and_a_dead_one_hands_it_back(library: SimpleNamespace) -> None:
    limits = attnmux.Limits(4, 64, 4096, 16)
    backend = backend_for(library, PLAIN, limits)
    short, long = (make_case(PLAIN, [Row(n, k) for n, k in zip((1, 4, 0, 2), lens, strict=True)]) for lens in ((5, 9, 0, 7), (900, 500, 3, 8)))
    state = planned(backend, short)
    [wrapper] = Wrapper.made
    held = wrapper.rest["paged_kv_indices_buf"]
    state = planned(backend, long, state)
    gc.collect()
    expect_close(long, computed(backend, long, state), oracle(long))
    assert Wrapper.made == [wrapper] and wrapper.rest["paged_kv_indices_buf"] is held and wrapper._max_total_num_rows == 16
    other = planned(backend, short)  # live at the same time
    assert len(Wrapper.made) == 2
    del state, other
    gc.collect()
    planned(backend, short)
    assert len(Wrapper.made) == 2


def test_a_plan_made_in_inference_mode_is_refreshed_outside(library: SimpleNamespace) -> None:
    spec = PLAIN.replace(return_lse=True)
    backend, case = backend_for(library, spec, attnmux.Limits(4, 64, 4096, 16)), make_case(spec, [Row(1, 9), Row(3, 40)])
    with torch.inference_mode():
        state = planned(backend, case)
    state = planned(backend, case, state)
    expect_close(case, computed(backend, case, state), oracle(case))


def test_more_tokens_than_first_planned_are_an_error(library: SimpleNamespace) -> None:
    backend = backend_for(library, PLAIN, attnmux.Limits(4, 64, 4096, 16))
    state = planned(backend, make_case(PLAIN, [Row(1, 9)] * 4))
    with pytest.raises(ValueError, match=r"the refreshed step is 8 query tokens .* wanted at most 4 and"):
        planned(backend, make_case(PLAIN, [Row(2, 9)] * 4), state)


def test_an_unfinished_copy_keeps_its_pinned_buffer(library: SimpleNamespace) -> None:
    """``Event`` says of a recorded copy that it is not done, so each plan needs another buffer; once done they are used again."""
    backend = backend_for(library, PLAIN)
    case, pins = make_case(PLAIN, [Row(1, 9)]), set()
    for _ in range(3):
        state = planned(backend, case)
        lane = state.launches[0].lane
        pins.add(lane.wrapper._pin_memory_int_workspace_buffer.data_ptr())
        del state
        gc.collect()
    assert len(pins) == 3 and len(Wrapper.made) == 1
    for _, event in lane._pinned:
        event.done = True
    planned(backend, case)
    assert lane.wrapper._pin_memory_int_workspace_buffer.data_ptr() in pins


def test_a_skewed_batch_is_cut_evenly_without_graphs(library: SimpleNamespace) -> None:
    spec = attnmux.AttentionSpec(32, 8, 128, BF16)
    rows = [Row(1, 40_000)] + [Row(1, 500)] * 31
    batch = attnmux.Batch(
        torch.arange(33, dtype=torch.int32),
        torch.tensor([r.kv_len for r in rows], dtype=torch.int32),
        torch.zeros(32, 2500, dtype=torch.int32),
        query_lens_cpu=[1] * 32,
        seq_lens_cpu=[r.kv_len for r in rows],
    )
    for options, cut in (({}, False), ({"cuda_graphs": False}, True)):
        backend = backend_for(library, spec, attnmux.Limits(32, 64, 40_000, 2), **options)
        backend.plan(batch, torch.empty(backend.workspace_bytes(backend.limits), dtype=torch.uint8), None)
        assert ("fixed_split_size" in Wrapper.made[-1].plans[-1]) == cut


@pytest.mark.parametrize(
    ("spec", "options", "error"),
    [
        (PLAIN, {"kernel": "fa4"}, "kernel in the options of flashinfer is 'fa4': did you mean 'fa3'.*auto, fa2, fa3, trtllm-gen, cudnn"),
        (PLAIN.replace(softcap=9.0), {"kernel": "fa3"}, "'fa3', wanted one that runs this spec on cuda:sm90: auto, fa2"),
        (PLAIN, {"kernel": "cudnn"}, "'cudnn', wanted one that runs this spec on cuda:sm90: auto, fa2, fa3"),
        (PLAIN, {"cuda_graphs": 1}, "cuda_graphs in the options of flashinfer is 1, wanted true or false"),
    ],
)
def test_options_that_cannot_be_met_are_errors(spec: Any, options: dict[str, Any], error: str, library: SimpleNamespace) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        backend_for(library, spec, **options)


def test_a_fixed_kernel_is_used(library: SimpleNamespace) -> None:
    case = make_case(PLAIN, (Row(80, 90), Row(1, 30)))
    for kernel in ("fa2", "fa3"):
        backend = backend_for(library, PLAIN, kernel=kernel)
        state = planned(backend, case)
        assert {launch.lane.module.kernel for launch in state.launches} == {kernel}
        expect_close(case, computed(backend, case, state), oracle(case))


def test_what_the_kernels_cannot_read_is_refused_or_copied(library: SimpleNamespace) -> None:
    case = make_case(PLAIN, (Row(2, 30),))
    backend = backend_for(library, PLAIN)
    state = planned(backend, case)
    shifted = torch.zeros(case.k_cache.numel() + 1, dtype=BF16)[1:].view(case.k_cache.shape)
    with pytest.raises(ValueError, match=r"k_cache is at 2 bytes past 16.*keys that begin on 16 bytes"):
        backend.run(case.q, shifted, case.v_cache, state, *case.outputs(), LayerArgs())
    odd = torch.zeros(case.q.numel() + 1, dtype=BF16)[1:].view(case.q.shape).copy_(case.q)  # queries are copied
    strided = torch.full((*case.q.shape[:2], 128), torch.nan, dtype=BF16)[..., :64]  # and so are outputs
    backend.run(odd, case.k_cache, case.v_cache, state, strided, None, LayerArgs())
    expect_close(case, Answer(strided, None), oracle(case))


def dense(
    q: Tensor, caches: tuple[Tensor, Tensor], scale: float, table: Tensor, lens: Tensor, starts: Tensor, left: int, sinks: Any, out: Tensor
) -> None:
    """Stands in for trtllm-gen: causal rows over HND pages by their table, every entry of which is followed."""
    assert q.is_contiguous() and out.is_contiguous() and table.dtype == lens.dtype == starts.dtype == torch.int32 and bool((table >= 0).all())
    for row in range(len(lens)):
        first, last, n = int(starts[row]), int(starts[row + 1]), int(lens[row])
        if first == last or not n:
            out[first:last] = torch.nan
            continue
        group = q.shape[1] // caches[0].shape[1]
        k, v = (c.transpose(1, 2)[table[row].long()].flatten(0, 1)[:n].double().repeat_interleave(group, 1) for c in caches)
        distance = torch.arange(last - first)[:, None] + n - (last - first) - torch.arange(n)
        score = torch.einsum("qhd,khd->hqk", q[first:last].double(), k) * scale
        score = score.masked_fill((distance < 0) | ((left >= 0) & (distance > left)), -torch.inf)
        if sinks is not None:
            score = torch.cat((score, sinks.double()[:, None, None].expand(-1, last - first, 1)), -1)
        out[first:last] = torch.einsum("hqk,khd->qhd", score.softmax(-1)[..., :n], v).to(out.dtype)


@pytest.mark.parametrize("lengths", ["exact", "upper_bound"])
@pytest.mark.parametrize("limits", [None, attnmux.Limits(16, 300, 200, 80)], ids=["no-limits", "limits"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 7}, {"sinks": True, "sliding_window": 20}], ids=["plain", "window", "sinks"])
def test_trtllm_gen_is_given_tables_cut_to_the_window(
    changes: dict[str, Any], limits: Any, lengths: Any, library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def decode(query: Tensor, kv_cache: Any, *, max_seq_len: int, q_len_per_req: None, max_q_len: int, **given: Any) -> None:
        calls.append("decode")
        context(query, kv_cache, batch_size=None, max_kv_len=max_seq_len, cum_seq_lens_kv=None, causal=True, max_q_len=max_q_len, **given)

    def context(
        query: Tensor, kv_cache: Any, *, batch_size: Any, max_kv_len: int, cum_seq_lens_kv: Any, causal: bool, max_q_len: int, **g: Any
    ) -> None:
        assert g["bmm2_scale"] == 1.0 and g["kv_layout"] == "HND" and g["backend"] == "trtllm-gen" and int(g["seq_lens"].max()) <= max_kv_len
        assert int(g["cum_seq_lens_q"].diff().max()) <= max_q_len
        dense(query, kv_cache, g["bmm1_scale"], g["block_tables"], g["seq_lens"], g["cum_seq_lens_q"], g["window_left"], g["sinks"], g["out"])

    monkeypatch.setitem(sys.modules, "flashinfer.decode", SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", SimpleNamespace(trtllm_batch_context_with_kv_cache=context))
    spec = PLAIN.replace(kv_layout="HND", **changes)
    backend, state = backend_for(library, spec, limits, "sm100"), None
    for seed in (0, 1):
        case = make_case(spec, (Row(1, 60), Row(16, 41), Row(0, 9), Row(70, 90), Row(2, 0), Row(2, 33)), seed=seed, lengths=lengths)
        state = planned(backend, case, state)
        expect_close(case, computed(backend, case, state), oracle(case))
    assert calls.count("decode") == 2


def test_a_bound_on_lengths_is_refused(library: SimpleNamespace) -> None:
    case = make_case(PLAIN, (Row(2, 30),), lengths="upper_bound")
    with pytest.raises(ValueError, match="lengths is 'upper_bound', wanted 'exact'"):
        planned(backend_for(library, PLAIN), case)

"""Whatever is wrong with a batch or a call is refused with argument, value and limit, before a bit of cache or output changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_plugins import info, lab, registry
from torch import Tensor

import attnmux
from attnmux.dispatch import host
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.spec import AttentionSpec

E4M3 = torch.float8_e4m3fn
NAN = float("nan")
PAGES, PAGE_SIZE = 8, 4
BASE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32, "page_size": PAGE_SIZE}


@pytest.fixture(scope="module", autouse=True)
def oracle() -> Iterator[None]:
    """The reference backend alone: it claims everything, so that every check can be reached."""
    made = Registry(["attnmux.platforms.cpu", "attnmux.backends.reference"], entry_points=False)
    with host.using(made):
        yield


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@dataclass
class World:
    """A spec with a batch and a call that are right, to be spoilt one thing at a time."""

    spec: AttentionSpec
    attn: attnmux.Attention = field(init=False)
    batch: dict[str, Any] = field(init=False)
    call: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        spec, generator = self.spec, torch.Generator().manual_seed(0)
        self.attn = attnmux.Attention(spec, "cpu")
        self.batch = {"query_start_loc": ints(0, 3, 4), "seq_lens": ints(5, 9)}
        if spec.page_size is None:
            self.batch["kv_start_loc"], shape = ints(0, 6, 15), (16, spec.num_kv_heads)
        else:
            self.batch["block_table"], shape = ints([1, 2, 7], [3, 4, 5]), (PAGES, spec.page_size, spec.num_kv_heads)
        if spec.causal == "per_sequence":
            self.batch["causal"] = torch.tensor([True, False])
        if spec.rswa_window:
            self.batch["prefix_lens"] = ints(1, 2)
        k = torch.randn((*shape, spec.head_size), generator=generator).to(spec.kv_dtype)
        v = torch.randn((*shape, spec.v_head_size), generator=generator).to(spec.kv_dtype)
        if spec.kv_layout == "HND":
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        self.call = {
            "q": torch.randn((5, spec.num_q_heads, spec.head_size), generator=generator).to(spec.q_dtype),
            "k_cache": k,
            "v_cache": v,
            "out": torch.full((5, spec.num_q_heads, spec.v_head_size), 7.0, dtype=spec.dtype),
        }
        if spec.sinks:
            self.call["sinks"] = torch.zeros(spec.num_q_heads)
        if spec.alibi:
            self.call["alibi_slopes"] = torch.full((spec.num_q_heads,), 0.1)
        if spec.kv_scale:
            scale = torch.ones(()) if spec.kv_scale == "tensor" else torch.ones(spec.num_kv_heads)
            self.call |= {"k_scale": scale, "v_scale": scale}

    def plan(self, into: attnmux.Plan | None = None, **changes: Any) -> attnmux.Plan:
        return self.attn.plan(attnmux.Batch(**{**self.batch, **changes}), into=into)

    def run(self, plan: attnmux.Plan, **changes: Any) -> Any:
        return self.attn.run(plan=plan, **{**self.call, **changes})


def world(**fields: Any) -> World:
    return World(AttentionSpec(**{**BASE, **fields}))


def bits(*tensors: Tensor) -> list[Tensor]:
    return [tensor.view(torch.uint8).clone() if tensor.dtype == E4M3 else tensor.clone() for tensor in tensors]


def refused(call: Callable[[], Any], error: type[Exception], message: str, *untouched: Tensor) -> None:
    before = bits(*untouched)
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
    assert type(caught.value) is error
    assert all(torch.equal(old, new) for old, new in zip(before, bits(*untouched), strict=True))


SPANS = {"mm_prefix": "override_window"}
UPPER = {"lengths": "upper_bound"}
BATCHES: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"seq_lens": None}, TypeError, "seq_lens is NoneType, wanted a tensor [seqs]"),
    ({}, {"seq_lens": [5, 9]}, TypeError, "seq_lens is list, wanted a tensor [seqs]"),
    ({}, {"seq_lens": ints(5, 9, dtype=torch.int64)}, TypeError, "seq_lens's dtype is int64, wanted int32"),
    ({}, {"seq_lens": ints([5, 9])}, ValueError, "seq_lens is [1, 2], wanted [seqs]"),
    ({}, {"seq_lens": ints(5, 9).to("meta")}, ValueError, "seq_lens's device is meta, wanted cpu"),
    ({}, {"seq_lens": ints(-1, 9)}, ValueError, "seq_lens is -1, wanted 0 or more"),
    ({}, {"seq_lens": ints(2, 9)}, ValueError, "seq_lens of row 0 is 2, wanted at least its 3 query tokens; seq_lens counts the new keys too"),
    ({}, {"query_start_loc": ints(0, 3)}, ValueError, "query_start_loc is [2], wanted [3]"),
    ({}, {"query_start_loc": ints(0, 3, 4, dtype=torch.int64)}, TypeError, "query_start_loc's dtype is int64, wanted int32"),
    ({}, {"query_start_loc": ints(1, 3, 4)}, ValueError, "query_start_loc is [1, 3, 4], wanted 0 first and never decreasing"),
    ({}, {"query_start_loc": ints(0, 4, 3)}, ValueError, "query_start_loc is [0, 4, 3], wanted 0 first and never decreasing"),
    ({}, {"block_table": None}, ValueError, "block_table is missing, wanted a tensor [2, cols]"),
    ({}, {"block_table": ints([1, 2, 7])}, ValueError, "block_table is [1, 3], wanted [2, cols]"),
    ({}, {"block_table": ints(1, 2)}, ValueError, "block_table is [2], wanted [2, cols]"),
    ({}, {"block_table": ints([1, 2, 7], [3, 4, 5], dtype=torch.int64)}, TypeError, "block_table's dtype is int64, wanted int32"),
    ({}, {"block_table": ints([1, 2], [3, 4])}, ValueError, "block_table of row 1 is 2 columns wide, 8 keys, wanted room for its 9 keys; widen"),
    ({}, {"kv_start_loc": ints(0, 6, 15)}, ValueError, "kv_start_loc is given, but keys lie in pages: leave it out"),
    ({"page_size": None}, {"kv_start_loc": None}, ValueError, "kv_start_loc is missing, wanted a tensor [3]"),
    ({"page_size": None}, {"block_table": ints([1], [2])}, ValueError, "block_table is given, but page_size=None means packed keys: leave it out"),
    ({"page_size": None}, {"kv_start_loc": ints(0, 4, 15)}, ValueError, "kv_start_loc of row 0 is 0 to 4, wanted room for its 5 keys"),
    ({"page_size": None}, {"kv_start_loc": ints(-1, 6, 15)}, ValueError, "kv_start_loc of row 0 is -1 to 6"),
    ({}, {"causal": torch.tensor([True, False])}, ValueError, "causal is given, but the spec says causal=True: leave it out"),
    ({"causal": "per_sequence"}, {"causal": None}, ValueError, "causal is missing, wanted a tensor [2]"),
    ({"causal": "per_sequence"}, {"causal": ints(1, 0)}, TypeError, "causal's dtype is int32, wanted bool"),
    ({"causal": "per_sequence"}, {"causal": torch.tensor([True])}, ValueError, "causal is [1], wanted [2]"),
    ({}, {"prefix_lens": ints(1, 2)}, ValueError, "prefix_lens is given, but the spec has no rswa_window: leave it out"),
    ({"rswa_window": 2}, {"prefix_lens": None}, ValueError, "prefix_lens is missing, wanted a tensor [2]"),
    ({"rswa_window": 2}, {"prefix_lens": ints(-1, 2)}, ValueError, "prefix_lens is -1, wanted 0 or more"),
    ({}, {"query_lens_cpu": [3]}, ValueError, "query_lens_cpu is 1 long, wanted 2, one a row"),
    ({}, {"query_lens_cpu": [3, -1]}, ValueError, "query_lens_cpu is -1, wanted 0 or more"),
    ({}, {"query_lens_cpu": [3, 1.5]}, TypeError, "query_lens_cpu is [3, 1.5], wanted 2 ints"),
    ({}, {"query_lens_cpu": 3}, TypeError, "query_lens_cpu is 3, wanted 2 ints"),
    ({}, {"query_lens_cpu": ints(3, 1)}, TypeError, "query_lens_cpu is a tensor, wanted a sequence of ints; pass query_lens_cpu.tolist()"),
    ({}, {"query_lens_cpu": [2, 2]}, ValueError, "query_lens_cpu is [2, 2], wanted the device's [3, 1]"),
    ({}, {"seq_lens_cpu": [5, 8]}, ValueError, "seq_lens_cpu is [5, 8], wanted the device's [5, 9]"),
    ({}, {"seq_lens_cpu": [6, 9]}, ValueError, "seq_lens_cpu is [6, 9], wanted the device's [5, 9]"),
    ({}, {"seq_lens_cpu": [6, 8], **UPPER}, ValueError, "seq_lens_cpu is [6, 8], wanted no less than the device's [5, 9]"),
    ({}, UPPER, ValueError, "lengths='upper_bound' without seq_lens_cpu: the bound itself is missing"),
    ({}, {"lengths": "about"}, ValueError, "lengths is 'about', wanted 'exact' or 'upper_bound'"),
    ({}, {"seq_lens": ints(2, 9), "seq_lens_cpu": [8, 9], **UPPER}, ValueError, "seq_lens of row 0 is 2, wanted at least its 3 query tokens"),
    ({}, {"seq_lens_cpu": [13, 9], **UPPER}, ValueError, "block_table of row 0 is 3 columns wide, 12 keys, wanted room for its 13 keys"),
    ({}, {"mm_spans": [[], []]}, ValueError, "mm_spans are given, but the spec has no mm_prefix"),
    (SPANS, {"mm_spans": [[]]}, ValueError, "mm_spans is 1 long, wanted 2, one list a row"),
    (SPANS, {"mm_spans": [(0, 2), []]}, ValueError, "mm_spans of row 0 is 0, wanted (start, end) or (start, end, group) with 0 <= start < end"),
    (SPANS, {"mm_spans": [5, []]}, TypeError, "mm_spans of row 0 is 5, wanted a list of spans"),
    (SPANS, {"mm_spans": [[(2, 2)], []]}, ValueError, "mm_spans of row 0 is (2, 2), wanted (start, end)"),
    (SPANS, {"mm_spans": [[(-1, 2)], []]}, ValueError, "mm_spans of row 0 is (-1, 2), wanted (start, end)"),
    (SPANS, {"mm_spans": [[(0, 2.0)], []]}, ValueError, "mm_spans of row 0 is (0, 2.0), wanted (start, end)"),
    (SPANS, {"mm_spans": [[(0, 1, 2, 3)], []]}, ValueError, "mm_spans of row 0 is (0, 1, 2, 3), wanted (start, end)"),
    (
        SPANS,
        {"mm_spans": [[], [(4, 10)]]},
        ValueError,
        "mm_spans of row 1 is (4, 10), wanted an end no later than its 9 keys; schedule a span's tokens",
    ),
    (SPANS, {"mm_spans": [[(0, 3), (2, 4)], []]}, ValueError, "mm_spans of row 0 is (0, 3) and (2, 4), wanted spans that do not overlap"),
    (SPANS, {"mm_spans": [[(2, 4, 1), (0, 3, 1)], []]}, ValueError, "mm_spans of row 0 is (0, 3, 1) and (2, 4, 1), wanted spans that do not"),
    (
        SPANS,
        {"mm_spans": [[(3, 8)], []], "seq_lens_cpu": [9, 9], **UPPER},
        ValueError,
        "mm_spans of row 0 is (3, 8), wanted an end no later than its 5",
    ),
]


@pytest.mark.parametrize(("fields", "changes", "error", "message"), BATCHES, ids=[f"{i}-{row[3][:40]}" for i, row in enumerate(BATCHES)])
def test_batches(fields: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str) -> None:
    right = world(**fields)
    plan = right.plan()
    before = right.run(plan).clone()
    refused(lambda: right.plan(**changes), error, message)
    refused(lambda: right.plan(into=plan, **changes), error, message)
    assert torch.equal(right.run(plan), before)  # a refused refresh leaves the plan as it was


def test_what_is_no_batch_or_no_plan() -> None:
    right, other = world(), world()
    refused(lambda: right.attn.plan({"seq_lens": 1}), TypeError, "batch is dict, wanted attnmux.Batch")  # type: ignore[arg-type]
    refused(lambda: right.plan(into=other.plan()), ValueError, "into is Plan, wanted a plan made by this Attention")
    refused(lambda: right.plan(into=1), ValueError, "into is int, wanted a plan made by this Attention")  # type: ignore[arg-type]
    refused(lambda: right.run(other.plan()), ValueError, "plan is Plan, wanted a plan made by this Attention")
    refused(lambda: right.run("plan"), ValueError, "plan is str, wanted a plan made by this Attention")  # type: ignore[arg-type]


PACKED = {"page_size": None}
INVISIBLE = [
    # what the table or the spans hold where no token may see
    ({}, {"block_table": ints([1, 2, -1], [3, 4, 5])}),
    ({}, {"block_table": ints([1, 2, 99], [3, 4, 5])}),
    ({"sliding_window": 2}, {"seq_lens": ints(8, 9), "block_table": ints([-1, 2, -1], [-1, 4, 5])}),
    ({"chunk": (4, 0)}, {"seq_lens": ints(7, 9), "block_table": ints([-1, 2, -1], [-1, -1, 5])}),
    ({"rswa_window": 2}, {"prefix_lens": ints(0, 2), "block_table": ints([1, 2, -1], [3, 4, 5])}),
    ({"rswa_window": 1}, {"prefix_lens": ints(0, 2), "seq_lens": ints(7, 9), "block_table": ints([-1, 2, -1], [3, -1, 5])}),
    ({**SPANS, "sliding_window": 2}, {"mm_spans": [[(0, 2)], []], "block_table": ints([-1, 2, -1], [-1, 4, 5]), "seq_lens": ints(8, 9)}),
    (SPANS, {"mm_spans": [[(5, 99)], [(9, 12)]]}),
    ({}, {"query_start_loc": ints(0, 0, 4), "block_table": ints([-1, -1, -1], [3, 4, 5])}),
    ({}, {"query_start_loc": ints(0, 0, 4), "seq_lens": ints(999, 9)}),
    ({}, {"seq_lens": ints(0, 9), "block_table": ints([-1, -1, -1], [3, 4, 5])}),
    ({}, {"seq_lens_cpu": [12, 12], "block_table": ints([1, 2, -1], [3, 4, 5]), **UPPER}),
]
VISIBLE = [
    ({}, {"block_table": ints([1, -1, 7], [3, 4, 5])}, "block_table reads pages is -1 to 5, wanted 0 to 7, what k_cache holds"),
    ({}, {"block_table": ints([1, 2, 7], [3, 8, 5])}, "block_table reads pages is 1 to 8, wanted 0 to 7"),
    ({"sliding_window": 3}, {"block_table": ints([-1, 2, -1], [-1, 4, 5])}, "block_table reads pages is -1 to 5"),
    ({"chunk": (4, 1)}, {"block_table": ints([1, 2, -1], [3, -1, 5])}, "block_table reads pages is -1 to 5"),
    ({"rswa_window": 2}, {"prefix_lens": ints(1, 2), "block_table": ints([-1, 2, -1], [3, 4, 5])}, "block_table reads pages is -1 to 5"),
    (
        {**SPANS, "sliding_window": 2},
        {"mm_spans": [[(0, 6)], []], "seq_lens": ints(8, 9), "block_table": ints([-1, 2, -1], [-1, 4, 5])},
        "block_table reads pages is -1 to 5",
    ),
    (
        {**SPANS, "sliding_window": 2},
        {"mm_spans": [[(0, 2, 1), (5, 6, 1)], []], "seq_lens": ints(8, 9), "block_table": ints([-1, 2, -1], [-1, 4, 5])},
        "block_table reads pages is -1 to 5",
    ),
    (PACKED, {"kv_start_loc": ints(0, 8, 17)}, "kv_start_loc reads keys is 0 to 16, wanted 0 to 15, what k_cache holds"),
    ({"attn_type": "cross"}, {"block_table": ints([-1, 2, 7], [3, 4, 5])}, "block_table reads pages is -1 to 5"),
]


@pytest.mark.parametrize(("fields", "changes"), INVISIBLE, ids=str)
def test_what_nobody_sees_is_never_read(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    right = world(**fields)
    right.run(right.plan(**changes))


@pytest.mark.parametrize(("fields", "changes", "message"), VISIBLE, ids=str)
def test_a_visible_page_beyond_the_pool(fields: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    right = world(**fields)
    plan = right.plan(**changes)
    refused(lambda: right.run(plan), ValueError, message, *(right.call[n] for n in ("k_cache", "v_cache", "out")))


def q(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, **options)


FP8_TENSOR = {"kv_dtype": E4M3, "kv_scale": "tensor"}
FP8_HEAD = {"kv_dtype": E4M3, "kv_scale": "head"}
CALLS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"q": None}, TypeError, "q is NoneType, wanted a tensor"),
    ({}, {"q": [1.0]}, TypeError, "q is list, wanted a tensor"),
    ({}, {"q": q(5, 4, 8, dtype=torch.float16)}, TypeError, "q's dtype is fp16, wanted fp32"),
    ({}, {"q": q(5, 32)}, ValueError, "q is of rank 2, wanted [tokens, Hq, D]"),
    ({}, {"q": torch.tensor(1.0)}, ValueError, "q is of rank 0, wanted [tokens, Hq, D]"),
    ({}, {"q": q(5, 8, 8)}, ValueError, "q is [5, 8, 8], wanted [tokens, 4, 8]"),
    ({}, {"q": q(5, 4, 16)}, ValueError, "q is [5, 4, 16], wanted [tokens, 4, 8]"),
    ({}, {"q": q(3, 4, 8), "out": q(3, 4, 8)}, ValueError, "q is 3 tokens long, wanted at least the plan's 4"),
    ({}, {"q": q(5, 4, 16)[..., ::2]}, ValueError, "q's last dimension is strided by 2, wanted contiguous"),
    ({}, {"q": q(5, 4, 8, requires_grad=True)}, ValueError, "q requires a gradient, and attnmux computes none: call under torch.no_grad()"),
    ({}, {"q": q(5, 4, 8, device="meta")}, ValueError, "q's device is meta, wanted cpu"),
    ({}, {"k_cache": None}, TypeError, "k_cache is NoneType, wanted a tensor"),
    ({}, {"k_cache": q(8, 4, 2, 8, dtype=torch.bfloat16)}, TypeError, "k_cache's dtype is bf16, wanted fp32"),
    ({}, {"k_cache": q(8, 16, 2, 8)}, ValueError, "k_cache is [8, 16, 2, 8], wanted [pages, 4, 2, 8]"),
    ({}, {"k_cache": q(8, 2, 4, 8)}, ValueError, "k_cache is [8, 2, 4, 8], wanted [pages, 4, 2, 8]"),
    ({"kv_layout": "HND"}, {"k_cache": q(8, 4, 2, 8)}, ValueError, "k_cache is [8, 4, 2, 8], wanted [pages, 2, 4, 8]"),
    ({}, {"v_cache": q(7, 4, 2, 8)}, ValueError, "v_cache is 7 pages, wanted k_cache's 8"),
    ({"v_head_size": 16}, {"v_cache": q(8, 4, 2, 8)}, ValueError, "v_cache is [8, 4, 2, 8], wanted [pages, 4, 2, 16]"),
    ({}, {"v_cache": q(8, 4, 2, 16)[..., ::2]}, ValueError, "v_cache's last dimension is strided by 2, wanted contiguous"),
    (PACKED, {"k_cache": q(8, 4, 2, 8)}, ValueError, "k_cache is [8, 4, 2, 8], wanted [kv_tokens, 2, 8]"),
    ({}, {"out": "out"}, TypeError, "out is str, wanted a tensor"),
    ({}, {"out": q(4, 4, 8)}, ValueError, "out is [4, 4, 8], wanted [5, 4, 8]"),
    ({"v_head_size": 16}, {"out": q(5, 4, 8)}, ValueError, "out is [5, 4, 8], wanted [5, 4, 16]"),
    ({}, {"out": q(5, 4, 8, dtype=torch.float16)}, TypeError, "out's dtype is fp16, wanted fp32"),
    ({}, {"out": q(5, 4, 16)[..., ::2]}, ValueError, "out's last dimension is strided by 2, wanted contiguous"),
    ({}, {"only": "image"}, ValueError, "only is 'image', wanted a row class of the spec: known: prefill, decode"),
    ({}, {"only": "decod"}, ValueError, "only is 'decod', wanted a row class of the spec: did you mean 'decode'?"),
    ({"sinks": True}, {"sinks": None}, ValueError, "sinks is missing, wanted a tensor [4]"),
    ({"sinks": True}, {"sinks": q(2)}, ValueError, "sinks is [2], wanted [4]"),
    ({"sinks": True}, {"sinks": 0.5}, TypeError, "sinks is float, wanted a tensor"),
    ({"sinks": True}, {"sinks": ints(1, 1, 1, 1)}, TypeError, "sinks's dtype is int32, wanted fp32 or bf16 or fp16 or float64"),
    ({"sinks": True}, {"sinks": q(4) * NAN}, ValueError, "sinks is NaN for some head, wanted numbers"),
    ({}, {"sinks": q(4)}, ValueError, "sinks is given, but the spec has sinks=False: leave it out"),
    ({"alibi": "linear"}, {"alibi_slopes": None}, ValueError, "alibi_slopes is missing, wanted a tensor [4]"),
    ({"alibi": "linear"}, {"alibi_slopes": q(4, dtype=torch.float16)}, TypeError, "alibi_slopes's dtype is fp16, wanted fp32"),
    ({"alibi": "sqrt"}, {"alibi_slopes": q(4) * NAN}, ValueError, "alibi_slopes is NaN for some head"),
    ({}, {"alibi_slopes": q(4)}, ValueError, "alibi_slopes is given, but the spec has alibi=None: leave it out"),
    ({}, {"k_scale": 1.0}, ValueError, "k_scale is given, but the spec has kv_scale=None: say 'tensor' or 'head' there, or leave it out"),
    ({}, {"q_scale": 1.0}, ValueError, "q_scale is given, but queries are fp32: leave it out"),
    (FP8_TENSOR, {"k_scale": None}, ValueError, "k_scale is missing, wanted a scale by tensor, as the spec says"),
    (FP8_TENSOR, {"v_scale": None}, ValueError, "v_scale is missing, wanted a scale by tensor, as the spec says"),
    (FP8_TENSOR, {"k_scale": NAN}, ValueError, "k_scale is nan, wanted finite and above 0"),
    (FP8_TENSOR, {"k_scale": 0.0}, ValueError, "k_scale is 0.0, wanted finite and above 0"),
    (FP8_TENSOR, {"v_scale": float("inf")}, ValueError, "v_scale is inf, wanted finite and above 0"),
    (FP8_TENSOR, {"v_scale": torch.tensor(NAN)}, ValueError, "v_scale is nan, wanted finite and above 0"),
    (FP8_TENSOR, {"v_scale": torch.tensor(-1.0)}, ValueError, "v_scale is -1.0, wanted finite and above 0"),
    (FP8_TENSOR, {"k_scale": q(2)}, ValueError, "k_scale is [2], wanted []"),
    (FP8_TENSOR, {"k_scale": torch.tensor(1.0, dtype=torch.float64)}, TypeError, "k_scale's dtype is float64, wanted fp32"),
    (FP8_TENSOR, {"k_scale": "one"}, TypeError, "k_scale is str, wanted a float or a float32 tensor"),
    (FP8_TENSOR, {"k_scale": True}, TypeError, "k_scale is bool, wanted a float or a float32 tensor"),
    (FP8_HEAD, {"k_scale": 1.0}, TypeError, "k_scale is 1.0, wanted a float32 tensor [2], one a KV head"),
    (FP8_HEAD, {"v_scale": torch.tensor([1.0, NAN])}, ValueError, "v_scale is [1.0, nan], wanted finite and above 0"),
    (FP8_HEAD, {"v_scale": torch.tensor(1.0)}, ValueError, "v_scale is [], wanted [2]"),
    ({"q_dtype": E4M3}, {"q_scale": NAN}, ValueError, "q_scale is nan, wanted finite and above 0"),
    ({"q_dtype": E4M3}, {"q": q(5, 4, 8)}, TypeError, "q's dtype is fp32, wanted fp8_e4m3fn"),
]


@pytest.mark.parametrize(("fields", "changes", "error", "message"), CALLS, ids=[f"{i}-{row[3][:40]}" for i, row in enumerate(CALLS)])
def test_calls(fields: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str) -> None:
    right = world(**fields)
    plan = right.plan()
    caches = [right.call["k_cache"], right.call["v_cache"]]
    refused(lambda: right.run(plan, **changes), error, message, *caches, right.call["out"])
    if "out" not in changes:
        refused(lambda: right.run(plan, **{**changes, "out": None}), error, message, *caches)
    before = bits(*caches)
    right.run(plan)
    assert not (right.call["out"][:4] == 7).all()
    assert (right.call["out"][4:] == 7).all()  # padding
    assert all(torch.equal(a, b) for a, b in zip(before, bits(*caches), strict=True))


SLOTS = ints(0, 31, -1, 5, dtype=torch.int64)
WRITES: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"k": None}, TypeError, "k is NoneType, wanted a tensor"),
    ({}, {"k": q(4, 2, 8, dtype=torch.float16)}, TypeError, "k's dtype is fp16, wanted fp32"),
    ({}, {"k": q(4, 4, 8)}, ValueError, "k is [4, 4, 8], wanted [tokens, 2, 8]"),
    ({}, {"k": q(4, 16)}, ValueError, "k is [4, 16], wanted [tokens, 2, 8]"),
    ({}, {"v": q(3, 2, 8)}, ValueError, "v is [3, 2, 8], wanted [4, 2, 8]"),
    ({"v_head_size": 16}, {"v": q(4, 2, 8)}, ValueError, "v is [4, 2, 8], wanted [4, 2, 16]"),
    ({}, {"k_cache": q(8, 4, 2, 16)}, ValueError, "k_cache is [8, 4, 2, 16], wanted [pages, 4, 2, 8]"),
    ({}, {"slot_mapping": [0, 1]}, TypeError, "slot_mapping is list, wanted a tensor"),
    ({}, {"slot_mapping": SLOTS.int()}, TypeError, "slot_mapping's dtype is int32, wanted int64"),
    ({}, {"slot_mapping": SLOTS[None]}, ValueError, "slot_mapping is [1, 4], wanted [tokens]"),
    ({}, {"slot_mapping": torch.arange(5)}, ValueError, "slot_mapping is 5 long, wanted at most k's 4 tokens"),
    ({}, {"slot_mapping": ints(0, 32, 1, 2, dtype=torch.int64)}, ValueError, "slot_mapping is 32, wanted -1 (skip) or 0 to 31, what k_cache holds"),
    ({}, {"slot_mapping": ints(0, -2, 1, 2, dtype=torch.int64)}, ValueError, "slot_mapping is -2, wanted -1 (skip) or 0 to 31"),
    (PACKED, {"slot_mapping": ints(0, 16, 1, 2, dtype=torch.int64)}, ValueError, "slot_mapping is 16, wanted -1 (skip) or 0 to 15"),
    ({}, {"slot_mapping": SLOTS.to("meta")}, ValueError, "slot_mapping's device is meta, wanted cpu"),
    ({}, {"k_scale": 1.0}, ValueError, "k_scale is given, but the spec has kv_scale=None"),
    (FP8_TENSOR, {"k_scale": None}, ValueError, "k_scale is missing, wanted a scale by tensor"),
    (FP8_TENSOR, {"v_scale": torch.tensor(NAN)}, ValueError, "v_scale is nan, wanted finite and above 0"),
]


@pytest.mark.parametrize(("fields", "changes", "error", "message"), WRITES, ids=[f"{i}-{row[3][:40]}" for i, row in enumerate(WRITES)])
def test_writes(fields: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str) -> None:
    right = world(**fields)
    slots = SLOTS if right.spec.page_size else SLOTS.clamp(max=15)
    new = {"k": torch.ones(4, 2, 8), "v": torch.ones(4, 2, right.spec.v_head_size), "slot_mapping": slots}
    scales = {name: right.call[name] for name in ("k_scale", "v_scale") if name in right.call}
    good = {**new, "k_cache": right.call["k_cache"], "v_cache": right.call["v_cache"], **scales}
    refused(lambda: right.attn.write_kv(**{**good, **changes}), error, message, right.call["k_cache"], right.call["v_cache"])
    before = bits(right.call["k_cache"])
    right.attn.write_kv(**good)
    assert not torch.equal(before[0], bits(right.call["k_cache"])[0])


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_num_seqs": 1}, "the batch's num_seqs is 2, wanted at most limits.max_num_seqs=1"),
        ({"max_num_tokens": 3}, "the batch's num_tokens is 4, wanted at most limits.max_num_tokens=3"),
        ({"max_seq_len": 8}, "the batch's seq_len is 9, wanted at most limits.max_seq_len=8"),
        ({"max_query_len": 2}, "the batch's query_len is 3, wanted at most limits.max_query_len=2"),
    ],
)
def test_limits(limit: dict[str, int], message: str) -> None:
    right = world()
    fitting = {"max_num_seqs": 2, "max_num_tokens": 4, "max_seq_len": 9, "max_query_len": 3}
    right.attn = attnmux.Attention(right.spec, "cpu", limits=attnmux.Limits(**fitting))
    right.run(right.plan())
    right.plan(query_start_loc=ints(0, 0, 1), seq_lens=ints(999, 9))  # padding rows may say any length
    right.attn = attnmux.Attention(right.spec, "cpu", limits=attnmux.Limits(**{**fitting, **limit}))
    refused(right.plan, ValueError, message)


def test_only_a_device_of_this_machine_can_run() -> None:
    spec = AttentionSpec(**BASE)
    made = Registry(["attnmux.platforms.cuda_sm90", "attnmux.backends.reference"], entry_points=False)
    message = re.escape("device is cuda:sm90, wanted a device of this machine; select() answers dry runs")
    with host.using(made), pytest.raises(ValueError, match=message):
        attnmux.Attention(spec, "cuda:sm90", require="reference")


def test_workspace_and_warmup_need_limits() -> None:
    attn = world().attn
    for call in (attn.workspace_bytes, attn.warmup):
        with pytest.raises(ValueError, match=r"needs limits: pass attnmux.Limits"):
            call()
    assert attn.workspace_bytes(attnmux.Limits(1, 1, 1, 1)) == 0


def test_upper_bounds_without_a_backend_that_takes_them(spec: AttentionSpec) -> None:
    with host.using(registry(platforms=[lab("a")], backends=[info("a")])):
        attn = attnmux.Attention(spec, "cpu")
        batch = attnmux.Batch(ints(0, 1), ints(1), ints([0]), seq_lens_cpu=[2], lengths="upper_bound")
        with pytest.raises(attnmux.NoBackendError, match="a: lengths upper_bound: takes exact"):
            attn.plan(batch)


def test_a_plan_that_is_gone_is_named() -> None:
    right = world()
    handle = right.plan().handle
    call = right.call
    with pytest.raises(ValueError, match="the plan behind this call no longer exists: keep it alive"):
        torch.ops.attnmux.attention(
            call["q"], call["k_cache"], call["v_cache"], call["out"], None, handle, None, None, None, None, None, None, None, None, None
        )

"""What each declared backend takes and refuses, fact by fact, and that the declarations are well formed."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import pytest
import torch

from attnmux.backends.flashinfer import COMPILER
from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.claims import CLAIM_FIELDS, BackendInfo
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.hookspecs import CONTRACT
from attnmux.dispatch.query import Query
from attnmux.dispatch.registry import BUILTINS, Registry
from attnmux.dispatch.requirements import Package, Toolchain
from attnmux.dispatch.spec import AttentionSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3FN, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
DECLARED = ("triton", "flashinfer", "flash_attn_3", "flash_attn_4", "flex", "ipex", "xpu_kernels", "aiter")
SPANS = {"mm_prefix": "override_window"}
PACKED = {"page_size": None}
ENCODER = {"attn_type": "encoder_only"}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    names = [name for name in BUILTINS if ".platforms." in name or name.rpartition(".")[2] in (*DECLARED, "compositions")]
    return Registry(names, entry_points=False).catalog


def refusals(info: BackendInfo, catalog: Catalog, device: str, row_class: str = "prefill", lengths: str = "exact", **changes: Any) -> set[str]:
    """The fields for which the backend refuses a spec; empty when it takes it."""
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": BF16, **changes})
    query = Query(spec, resolve(device, catalog, ()), row_class, lengths)  # type: ignore[arg-type]
    claim, reasons = info.judge(query, None)
    assert (claim is None) == bool(reasons)
    return {reason.field for reason in reasons}


EVERYTHING: list[dict[str, Any]] = [
    {"head_size": size} for size in (16, 24, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
] + [
    {"page_size": 1}, {"page_size": 1056}, {"page_size": None}, {"kv_layout": "HND"}, {"num_q_heads": 71, "num_kv_heads": 1},
    {"sliding_window": 1}, {"sliding_window": 8, "window_right": 3, "causal": False}, {"chunk": (64, 1)}, {"softcap": 30.0},
    {"alibi": "linear"}, {"alibi": "sqrt"}, {"sinks": True}, {"mm_prefix": "override_window"}, {"mm_prefix": "within_window", "sliding_window": 9},
    {"rswa_window": 128}, {"return_lse": True}, {"batch_invariant": True}, {"causal": "per_sequence"}, {"lengths": "upper_bound"},
    {"attn_type": "encoder_only"}, {"attn_type": "cross"}, {"head_size": 192, "v_head_size": 128}, {"q_dtype": E4M3FN},
    *({"kv_dtype": dtype, "kv_scale": scale} for dtype in (E4M3FN, E5M2, FNUZ, torch.float8_e5m2fnuz) for scale in ("tensor", "head")),
]  # fmt: skip


@pytest.mark.parametrize("row_class", ["image", "prefill", "decode"])
@pytest.mark.parametrize("device", ["cuda:sm75", "cuda:sm80", "cuda:sm90", "cuda:sm120", "cuda:sm150", "rocm:gfx90a", "rocm:mi300", "xpu", "cpu"])
def test_triton_takes_every_semantic(device: str, row_class: str, catalog: Catalog) -> None:
    for changes in EVERYTHING:
        assert not refusals(catalog.backends["triton"], catalog, device, row_class, **{"dtype": FP16, **changes}), changes


FACTS = [
    # backend, device, what is asked for, the field refused ("" when it is taken)
    ("triton", "cuda:sm75", {}, "dtype"),
    ("triton", "cuda:sm75", {"dtype": FP32}, "dtype"),
    ("triton", "cuda:sm80", {"dtype": FP32}, ""),
    ("triton", "cuda:sm70", {"dtype": FP16}, "device"),
    ("triton", "cpu", {}, "dtype"),
    ("triton", "cuda:sm90", {"head_size": 8}, "head_size v_head_size"),
    ("triton", "cuda:sm90", {"head_size": 100}, "head_size v_head_size"),
    ("triton", "cuda:sm90", {"page_size": 1057}, "page_size"),
    ("flashinfer", "cuda:sm90", {"head_size": 96}, "head_size"),
    ("flashinfer", "cuda:sm75", {"dtype": FP16}, "device"),
    ("flashinfer", "cuda:sm150", {}, "device"),
    ("flashinfer", "cuda:sm80", {"head_size": 512}, ""),
    ("flashinfer", "cuda:sm86", {"head_size": 512}, "head_size"),
    ("flashinfer", "cuda:sm80", {"page_size": 1, "kv_layout": "HND", "softcap": 9.0, "sliding_window": 4}, ""),
    ("flashinfer", "cuda:sm80", PACKED, ""),
    ("flashinfer", "cuda:sm80", {"dtype": FP32}, "dtype"),
    ("flashinfer", "cuda:sm80", {"sinks": True}, ""),
    ("flashinfer", "cuda:sm80", {"sinks": True, "softcap": 9.0}, "softcap"),
    ("flashinfer", "cuda:sm80", {"alibi": "linear"}, ""),
    ("flashinfer", "cuda:sm80", {"alibi": "sqrt"}, "alibi"),
    ("flashinfer", "cuda:sm80", {"kv_dtype": E4M3FN, "kv_scale": "tensor"}, ""),
    ("flashinfer", "cuda:sm80", {"kv_dtype": E4M3FN, "kv_scale": "head"}, "kv_scale"),
    ("flashinfer", "cuda:sm80", {"kv_dtype": FNUZ}, "kv_dtype"),
    ("flashinfer", "cuda:sm80", {"q_dtype": E4M3FN}, "q_dtype"),
    ("flashinfer", "cuda:sm80", {"attn_type": "cross"}, ""),
    ("flashinfer", "cuda:sm80", {**ENCODER, "sliding_window": 8}, "sliding_window"),
    ("flashinfer", "cuda:sm80", {"causal": "per_sequence"}, "causal"),
    ("flashinfer", "cuda:sm80", {"batch_invariant": True}, "batch_invariant"),
    ("flashinfer", "cuda:sm80", {"lengths": "upper_bound"}, "lengths"),
    ("flashinfer", "cuda:sm80", {"row_class": "image", **SPANS}, ""),
    ("flashinfer", "cuda:sm80", {"row_class": "image", "mm_prefix": "within_window", "sliding_window": 64}, ""),
    ("flashinfer", "cuda:sm80", {"row_class": "image", "softcap": 9.0, **SPANS}, "softcap"),
    ("flashinfer", "cuda:sm80", {"row_class": "image", "sinks": True, **SPANS}, "sinks"),
    ("flashinfer", "cuda:sm90", {"head_size": 192, "v_head_size": 128}, ""),
    ("flashinfer", "cuda:sm80", {"head_size": 192, "v_head_size": 128}, "head_size v_head_size"),
    ("flashinfer", "cuda:sm100", {"kv_layout": "HND", "lengths": "upper_bound", "sinks": True, "head_size": 64}, ""),
    ("flashinfer", "cuda:sm120", {"kv_layout": "HND", "lengths": "upper_bound"}, "lengths"),
    ("flash_attn_3", "cuda:sm90", {"sinks": True, "sliding_window": 128, "return_lse": True, "lengths": "upper_bound"}, ""),
    ("flash_attn_3", "cuda:sm90", {"softcap": 9.0}, "softcap"),
    ("flash_attn_3", "cuda:sm90", {"head_size": 96}, ""),
    ("flash_attn_3", "cuda:sm90", {"head_size": 72}, "head_size"),
    ("flash_attn_3", "cuda:sm90", {"scale": -0.1}, "scale"),
    ("flash_attn_3", "cuda:sm90", {"head_size": 192, "v_head_size": 128}, "v_head_size"),
    ("flash_attn_3", "cuda:sm90", {"page_size": 8}, ""),
    ("flash_attn_3", "cuda:sm90", {"page_size": 128, "kv_layout": "HND"}, ""),
    ("flash_attn_3", "cuda:sm90", {"kv_dtype": E4M3FN, "q_dtype": E4M3FN, "kv_scale": "head"}, "q_dtype kv_dtype kv_scale"),
    ("flash_attn_3", "cuda:sm90", {"row_class": "image", **SPANS}, "row_class mm_prefix"),
    ("flash_attn_3", "cuda:sm100", {}, "device"),
    ("flash_attn_4", "cuda:sm90", {"head_size": 80, "softcap": 9.0, "sinks": True, "sliding_window": 5}, ""),
    ("flash_attn_4", "cuda:sm90", {"page_size": 128, "kv_layout": "HND"}, ""),
    ("flash_attn_4", "cuda:sm90", {"head_size": 72}, "head_size"),
    ("flash_attn_4", "cuda:sm100", {"page_size": 128}, "page_size"),
    ("flash_attn_4", "cuda:sm90", {"alibi": "linear"}, "alibi"),
    ("flash_attn_4", "cuda:sm90", {"head_size": 192}, ""),
    ("flash_attn_4", "cuda:sm100", {"head_size": 192, "v_head_size": 128}, ""),
    ("flash_attn_4", "cuda:sm100", {"head_size": 160}, "head_size"),
    ("flash_attn_4", "cuda:sm80", {}, "device"),
    ("flash_attn_4", "cuda:sm120", {}, "device"),
    ("flex", "cuda:sm70", {"dtype": FP32, "alibi": "sqrt", "row_class": "image", **SPANS}, ""),
    ("flex", "rocm:gfx1100", {"sinks": True, "return_lse": True, "causal": "per_sequence"}, ""),
    ("flex", "cpu", {"rswa_window": 64}, ""),
    ("flex", "cuda:sm80", {"lengths": "upper_bound"}, "lengths"),
    ("flex", "cuda:sm80", {"kv_layout": "HND"}, "kv_layout"),
    ("flex", "cuda:sm80", {"page_size": 48}, "page_size"),
    ("flex", "cuda:sm80", {"kv_dtype": E4M3FN}, "kv_dtype"),
    ("flex", "cuda:sm80", {"batch_invariant": True}, "batch_invariant"),
    ("ipex", "cpu", {"kv_layout": "HND", "softcap": 9.0, "alibi": "linear", "sliding_window": 9}, ""),
    ("ipex", "cpu", {}, "kv_layout"),
    ("ipex", "cpu", {"kv_layout": "HND", "sinks": True}, "sinks"),
    ("ipex", "cpu", {"kv_layout": "HND", "return_lse": True}, "return_lse"),
    ("ipex", "cpu", {"kv_layout": "HND", "causal": False}, "causal"),
    ("ipex", "cpu:aarch64", {"kv_layout": "HND"}, "device"),
    ("xpu_kernels", "xpu", {}, ""),
    ("xpu_kernels", "xpu", {"dtype": FP32}, "dtype"),
    ("xpu_kernels", "xpu", {"alibi": "linear"}, "alibi"),
    ("xpu_kernels", "xpu", {"page_size": 128}, "page_size"),
    ("xpu_kernels", "xpu", {"head_size": 64, "page_size": 64, "sinks": True}, ""),
    ("aiter", "rocm:mi300", {"sinks": True, "softcap": 9.0, "alibi": "linear", "sliding_window": 9}, ""),
    ("aiter", "rocm:mi300", {"return_lse": True}, "return_lse"),
    ("aiter", "rocm:mi300", {"return_lse": True, "causal": False, **PACKED}, ""),
    ("aiter", "rocm:gfx90a", {}, "device"),
]


@pytest.mark.parametrize(("name", "device", "changes", "field"), FACTS)
def test_facts(name: str, device: str, changes: dict[str, Any], field: str, catalog: Catalog) -> None:
    assert refusals(catalog.backends[name], catalog, device, **changes) == set(field.split())


HOMES = {"ipex": "cpu", "xpu_kernels": "xpu", "aiter": "rocm:mi300"}


@pytest.mark.parametrize("name", DECLARED)
def test_spans_concern_image_rows_only(name: str, catalog: Catalog) -> None:
    """A row without a span is plain causal text whatever ``mm_prefix`` says; a row with one needs a kernel for it."""
    info, device, layout = catalog.backends[name], HOMES.get(name, "cuda:sm90"), "HND" if name == "ipex" else "NHD"
    for row_class in ("prefill", "decode"):
        assert not refusals(info, catalog, device, row_class, kv_layout=layout, **SPANS)
    able = name in ("triton", "flashinfer", "flex")
    assert refusals(info, catalog, device, "image", kv_layout=layout, **SPANS) == (set() if able else {"row_class", "mm_prefix"})


@pytest.mark.parametrize("name", DECLARED)
def test_declarations_are_well_formed(name: str, catalog: Catalog) -> None:
    info = catalog.backends[name]
    module = importlib.import_module(f"attnmux.backends.{name}")
    assert module.attnmux_contract == ".".join(map(str, CONTRACT))
    assert info.name == name
    assert info.summary
    assert info.requires
    assert len(set(info.claims)) == len(info.claims)
    for claim in info.claims:
        for constraint in map(claim.constraint, CLAIM_FIELDS):
            assert constraint.wants()


def test_flashinfer_without_a_compiler(catalog: Catalog) -> None:
    """fa2 is compiled at first use; on Blackwell NVIDIA's prebuilt kernels take what they can without nvcc and ninja."""
    info = catalog.backends["flashinfer"]
    cudnn = next(r for r in info.requirements() if isinstance(r, Package) and r.name == "nvidia-cudnn-frontend")
    for device, toolchain, codes in (
        ("cuda:sm80", Toolchain({cudnn: "1.32"}), {"tool"}),
        ("cuda:sm100", Toolchain({cudnn: "1.32"}), set()),
        ("cuda:sm100", Toolchain(), {"unsupported"}),  # trtllm-gen, but for the layout
        ("cuda:sm80", Toolchain(dict.fromkeys(COMPILER, "/usr/bin")), set()),
    ):
        query = Query(AttentionSpec(32, 8, 128, BF16), resolve(device, catalog, ()), "prefill")
        assert {reason.code for reason in info.judge(query, toolchain)[1]} == codes


def test_a_package_may_come_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton-rocm": "3.7.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert Package("triton", ">=3.4", also=("triton-rocm",)).probe() == "3.7.0"
    assert Package("triton", ">=3.4").probe() is None

"""The selector against a table of devices and specs. All dry runs, whatever machine this runs on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.device import Device
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.registry import BUILTINS, Registry
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.selector import decide
from attnmux.dispatch.spec import AttentionSpec
from attnmux.dispatch.steering import Steered

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3FN, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
SPANS = {"mm_prefix": "override_window"}
ENCODER = {"attn_type": "encoder_only", "page_size": None}


@dataclass(frozen=True)
class Case:
    """A question and its answer: ``prefill decode``, or ``image prefill decode`` for specs with spans."""

    device: str
    name: str
    routes: str
    changes: dict[str, Any]
    lengths: str = "exact"

    def __str__(self) -> str:
        what = "-".join(f"{k}={v}" for k, v in self.changes.items()).replace("torch.", "") or "plain"
        return f"{self.device}-{what}" + ("" if self.lengths == "exact" else "-upper_bound")


def case(device: str, name: str, routes: str = "", lengths: str = "exact", **changes: Any) -> Case:
    return Case(device, name, routes, changes, lengths)


ROUTES = [
    case("cuda:sm75", "triton", dtype=FP16),
    case("cuda:sm75", "triton", dtype=FP16, sinks=True),
    case("cuda:sm75", "triton", dtype=FP16, head_size=72, **SPANS),
    case("cuda:sm75", "flex"),  # bf16
    case("cuda:sm75", "flex", dtype=FP32),
    case("cuda:sm80", "flashinfer"),
    case("cuda:sm80", "triton", sinks=True),
    case("cuda:sm80", "flashinfer", alibi="linear"),
    case("cuda:sm80", "triton", alibi="sqrt"),
    case("cuda:sm80", "triton", rswa_window=128),
    case("cuda:sm80", "flashinfer", head_size=512),
    case("cuda:sm80", "triton_flashinfer", "triton flashinfer flashinfer", **SPANS),
    case("cuda:sm80", "triton_flashinfer", "triton flashinfer flashinfer", softcap=50.0, **SPANS),
    case("cuda:sm80", "triton", "triton triton triton", dtype=FP32, **SPANS),
    case("cuda:sm80", "flashinfer", "flashinfer", **ENCODER),
    case("cuda:sm80", "triton", "triton", sliding_window=64, **ENCODER),
    case("cuda:sm80", "flashinfer", attn_type="cross"),
    case("cuda:sm80", "triton", lengths="upper_bound"),
    case("cuda:sm86", "flashinfer", head_size=256, sliding_window=1024, softcap=30.0),
    case("cuda:sm86", "triton", head_size=512),
    case("cuda:sm86", "triton", head_size=96),
    case("cuda:sm89", "flashinfer", page_size=1, kv_layout="HND"),
    case("cuda:sm89", "flashinfer", kv_dtype=E4M3FN, kv_scale="tensor"),
    case("cuda:sm89", "triton", kv_dtype=E5M2, kv_scale="head"),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton"),
    case("cuda:sm90", "triton", head_size=64, sinks=True, sliding_window=128),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", head_size=64, sinks=True, sliding_window=4096),
    case("cuda:sm90", "triton_flash_attn_4", "triton flash_attn_4 triton", head_size=256, **SPANS),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", head_size=96, return_lse=True),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", lengths="upper_bound"),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", attn_type="cross"),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", page_size=128),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", page_size=64, kv_layout="HND"),
    case("cuda:sm90", "triton", q_dtype=E4M3FN, kv_dtype=E4M3FN, kv_scale="head"),
    case("cuda:sm90", "flashinfer+triton", "flashinfer triton", kv_dtype=E4M3FN, kv_scale="tensor"),
    case("cuda:sm90", "flashinfer+triton", "flashinfer triton", head_size=192, v_head_size=128),
    case("cuda:sm90", "flashinfer+triton", "flashinfer triton", alibi="linear"),
    case("cuda:sm90", "triton_flash_attn_4", "flash_attn_4 triton", page_size=1),
    case("cuda:sm90", "flash_attn_4", "flash_attn_4", sliding_window=64, **ENCODER),
    case("cuda:sm90", "triton", head_size=80),
    case("cuda:sm90", "triton", batch_invariant=True),
    case("cuda:sm90", "triton", chunk=(8192, 1)),
    case("cuda:sm90", "triton", causal="per_sequence"),
    case("cuda:sm90", "triton", kv_dtype=FNUZ, kv_scale="tensor"),
    case("cuda:sm100", "flashinfer"),
    case("cuda:sm100", "flashinfer", head_size=512),
    case("cuda:sm100", "flashinfer", head_size=64, sinks=True, page_size=64, kv_layout="HND"),
    case("cuda:sm100", "flashinfer", page_size=64, kv_layout="HND", lengths="upper_bound"),
    case("cuda:sm100", "triton_flashinfer", "triton flashinfer flashinfer", **SPANS),
    case("cuda:sm100", "flash_attn_4", causal=False),
    case("cuda:sm100", "flash_attn_4", "flash_attn_4", **ENCODER),
    case("cuda:sm100", "triton_flashinfer", "triton flashinfer flashinfer", head_size=256, **SPANS),
    case("cuda:sm100", "triton_flashinfer", "triton flashinfer flashinfer", head_size=512, mm_prefix="within_window", sliding_window=512),
    case("cuda:sm100", "flash_attn_4", head_size=96),
    case("cuda:sm100", "flash_attn_4", head_size=192, v_head_size=128),
    case("cuda:sm100", "flash_attn_4", lengths="upper_bound"),
    case("cuda:sm100", "triton", head_size=192),
    case("cuda:sm100", "triton", head_size=96, page_size=128),
    case("cuda:sm103", "triton_flashinfer", "triton flashinfer flashinfer", head_size=256, **SPANS),
    case("cuda:sm110", "flash_attn_4", head_size=96),
    case("cuda:sm120", "flashinfer"),
    case("cuda:sm120", "flashinfer", sinks=True),
    case("cuda:sm120", "triton_flashinfer", "triton flashinfer flashinfer", head_size=256, **SPANS),
    case("cuda:sm120", "triton", head_size=512),
    case("cuda:sm121", "flashinfer", sliding_window=4096),
    case("cuda:sm150", "triton"),
    case("cuda:sm150", "triton", "triton triton triton", head_size=512, **SPANS),
    case("cuda:sm70", "flex"),
    case("rocm:gfx90a", "triton"),
    case("rocm:gfx942", "triton", "triton triton triton", head_size=256, **SPANS),
    case("rocm:mi300", "triton", kv_dtype=FNUZ, kv_scale="head", kv_layout="HND"),
    case("rocm:gfx950", "triton", kv_dtype=E4M3FN, kv_scale="tensor"),
    case("rocm:gfx1100", "triton", dtype=FP32),
    case("xpu", "xpu_kernels"),
    case("xpu", "triton", dtype=FP32),
    case("xpu", "triton", page_size=128),
    case("xpu", "xpu_kernels", head_size=64, page_size=64, sinks=True, sliding_window=128),
    case("xpu", "triton+xpu_kernels", "triton xpu_kernels xpu_kernels", **SPANS),
    case("cpu", "sdpa"),
    case("cpu", "ipex", kv_layout="HND"),
    case("cpu:aarch64", "sdpa", kv_layout="HND"),
    case("cpu", "sdpa", "sdpa", **ENCODER),
    case("cpu", "sdpa", dtype=FP32, sinks=True, rswa_window=128, alibi="sqrt"),
    case("cpu", "reference", softcap=30.0),
    case("cpu", "reference", kv_dtype=E4M3FN, kv_scale="head", batch_invariant=True),
]

HARD = [
    ({"alibi": "sqrt"}, "square-root"),
    ({"rswa_window": 128}, "R-SWA"),
    ({"dtype": FP32}, "fp32"),
    ({"head_size": 48}, "head sizes"),
    ({"head_size": 80}, "head sizes"),
]
"""What Triton leads in on every GPU, and a word of the rule that says so."""


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    registry = Registry(entry_points=False)
    assert not [r for r in registry.records.values() if r.state == "failed"], registry.records
    return registry.catalog


def ask(catalog: Catalog, device: str, lengths: str = "exact", **changes: Any) -> Selection:
    """The answer for a device that nobody has: no machine is looked at."""
    spec = AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": BF16, **changes})
    place = resolve(device, catalog, ())
    assert not place.real
    return decide(spec, place, lengths, catalog, Toolchain(), Steered())  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_routes(case: Case, catalog: Catalog) -> None:
    found = ask(catalog, case.device, case.lengths, **case.changes)
    expected = case.routes.split() or [case.name] * len(found.spec.row_classes)
    assert " ".join(f"{c}:{b}" for c, b in found.routes.items()) == " ".join(
        f"{c}:{b}" for c, b in zip(found.spec.row_classes, expected, strict=True)
    )
    assert found.name == case.name
    assert found.complete


@pytest.mark.parametrize("device", ["cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "cuda:sm150", "xpu"])
@pytest.mark.parametrize(("changes", "word"), HARD, ids=str)
def test_triton_leads_on_every_gpu(device: str, changes: dict[str, Any], word: str, catalog: Catalog) -> None:
    found = ask(catalog, device, **changes)
    for decision in found.classes.values():
        assert decision.backend == "triton"
        assert word in decision.default.order.reason


@pytest.mark.parametrize("name", ["cuda_sm80", "cuda_sm90", "cuda_sm100", "cuda_generic", "rocm_mi300", "rocm_generic", "xpu", "cpu"])
def test_every_rule_decides_some_case(name: str, catalog: Catalog) -> None:
    """No entry of an order is dead: each decides one of the cases above."""
    questions = [(c.device, c.lengths, c.changes) for c in ROUTES]
    questions += [(d, "exact", changes) for d in ("cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "xpu") for changes, _ in HARD]
    decided = set()
    for device, lengths, changes in questions:
        found = ask(catalog, device, lengths, **changes)
        if found.device.platform == name:
            decided |= {d.default.order.reason for d in found.classes.values()}
    assert decided == {order.reason for order in catalog.platforms[name].orders}


def test_every_name_in_an_order_exists(catalog: Catalog) -> None:
    for platform in catalog.platforms.values():
        for order in platform.orders:
            assert set(order.names) <= set(catalog.names()), platform.name
            assert order.reason
    for composition in catalog.compositions.values():
        assert {backend for _, backend in composition.parts} <= set(catalog.backends)


MUTATIONS = [
    ("cuda_sm80", "before Hopper", "cuda:sm80", {"sinks": True}, "flashinfer"),
    ("cuda_sm90", "steps of 32", "cuda:sm90", {"head_size": 80}, "triton_flash_attn_4"),
    ("cuda_sm90", "decode wants", "cuda:sm90", {}, "flash_attn_4"),
    ("cuda_sm90", "short window", "cuda:sm90", {"head_size": 64, "sinks": True, "sliding_window": 128}, "triton_flash_attn_4"),
    ("cuda_sm100", "range wrapper", "cuda:sm100", {"head_size": 256, **SPANS}, "flashinfer"),
    ("cuda_sm100", "are causal", "cuda:sm100", {"causal": False}, "flashinfer"),
    ("xpu", "tuned for Xe2", "xpu", {}, "none"),
]


@pytest.mark.parametrize(("platform", "reason", "device", "changes", "name"), MUTATIONS)
def test_without_its_rule_the_answer_differs(platform: str, reason: str, device: str, changes: dict[str, Any], name: str, catalog: Catalog) -> None:
    """The table's negative control: the rule is what makes the answer."""
    whole = catalog.platforms[platform]
    kept = tuple(order for order in whole.orders if reason not in order.reason)
    assert len(kept) == len(whole.orders) - 1
    less = replace(catalog, platforms={**catalog.platforms, platform: replace(whole, orders=kept)})
    found = ask(less, device, **changes)
    assert found.name == name != ask(catalog, device, **changes).name


def test_aiter_runs_only_where_it_is_named(catalog: Catalog) -> None:
    found = ask(catalog, "rocm:mi300")
    assert [reason.code for reason in found.rejected["aiter"]] == ["not-ordered"]


def test_absence_is_a_note_in_a_dry_run_and_a_reason_on_a_real_machine(catalog: Catalog) -> None:
    dry = ask(catalog, "cuda:sm80")
    chosen = dry.classes["prefill"].candidates[0]
    assert chosen.name == "flashinfer"
    assert any("nvcc" in note for note in chosen.notes)
    assert any("not in this version yet" in note for note in chosen.notes) == (catalog.backends["flashinfer"].implementation is None)
    real: Device = replace(dry.device, real=True)
    found = decide(dry.spec, real, "exact", catalog, Toolchain(), Steered())
    assert {"package", "tool"} <= {reason.code for reason in found.rejected["flashinfer"]}


OPTIONAL = (
    "triton",
    "flashinfer",
    "flash_attn",
    "flash_attn_interface",
    "intel_extension_for_pytorch",
    "helion",
    "transformers",
    "vllm_xpu_kernels",
    "aiter",
)


def test_importing_and_selecting_import_no_optional_package() -> None:
    """A finder ahead of all others records every attempt, installed or not; the last line shows that it would notice."""
    program = f"""
        import sys, torch
        tried = []
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {OPTIONAL!r}:
                    tried.append(name)
        sys.meta_path.insert(0, Finder())
        import importlib, attnmux
        for module in {BUILTINS!r}:
            importlib.import_module(module)
        attnmux.devices()
        spec = attnmux.AttentionSpec(32, 8, 128, torch.bfloat16, mm_prefix="override_window")
        for device in ("cuda:sm75", "cuda:sm90", "cuda:sm100", "rocm:mi300", "xpu", "cpu"):
            attnmux.select(spec, device=device).explain()
        assert not tried, tried
        assert not torch.cuda.is_initialized()
        assert not [name for name in {OPTIONAL!r} if name in sys.modules]
        importlib.util.find_spec("triton")
        assert tried
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)

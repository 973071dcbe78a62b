"""Every variant of the kernels compiles for every target, within its shared memory, and the default ones without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.triton import launch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
TARGETS = ("sm80", "sm90", "sm100", "sm120", "gfx942", "gfx950")
WITHOUT_SPILLS = ("sm80", "sm90", "gfx942")
FEW = 16
"""Bytes that a thread may spill where its registers are bounded so that one more program finds room."""
LONG = 160
"""Bytes for tiles of long rows, which were timed with them: nearly all outside of the loop without masks."""
KINDS = ("prefill", "verify", "decode")

DEFAULTS: dict[str, dict[str, Any]] = {
    **{f"D{size}": {"head_size": size} for size in (64, 80, 128, 256, 512)},
    "D192/128": {"head_size": 192, "v_head_size": 128},
    "D128 fp16": {"dtype": FP16},
    "D128 page of 128": {"page_size": 128},
    "D256 page of 64": {"head_size": 256, "page_size": 64},
    **{f"D{size} fp32": {"head_size": size, "dtype": FP32} for size in (64, 128, 256, 512)},
    **{f"D{size} e4m3fn": {"head_size": size, "kv_dtype": E4M3, "kv_scale": "tensor"} for size in (64, 128, 256, 512)},
    "D128 e5m2": {"kv_dtype": E5M2, "kv_scale": "head"},
    "D128 e4m3fnuz": {"kv_dtype": E4M3_FNUZ, "kv_scale": "head"},
    "D128 fp32 e5m2fnuz": {"dtype": FP32, "kv_dtype": E5M2_FNUZ},
}
FEATURES: dict[str, dict[str, Any]] = {
    "fp8 query": {"q_dtype": E4M3, "kv_dtype": E4M3, "kv_scale": "tensor"},
    "page of 1": {"page_size": 1},
    "page of 48": {"page_size": 48},
    "page of 256": {"page_size": 256},
    "packed": {"page_size": None},
    "heads before keys": {"kv_layout": "HND"},
    "group of 71": {"num_q_heads": 71, "num_kv_heads": 1, "head_size": 64},
    "group of 1": {"num_q_heads": 8},
    "window": {"sliding_window": 128},
    "window right": {"sliding_window": 128, "window_right": 16, "causal": False},
    "chunk": {"chunk": (8192, 0)},
    "softcap": {"softcap": 50.0},
    "softcap fp32": {"softcap": 50.0, "dtype": FP32},
    "sinks": {"sinks": True},
    "alibi": {"alibi": "linear"},
    "alibi sqrt": {"alibi": "sqrt"},
    "override window": {"mm_prefix": "override_window", "sliding_window": 512},
    "within window": {"mm_prefix": "within_window", "sliding_window": 512},
    "reference window": {"rswa_window": 128},
    "causal per sequence": {"causal": "per_sequence"},
    "encoder": {"attn_type": "encoder_only"},
    "cross": {"attn_type": "cross"},
    "batch invariant": {"batch_invariant": True, "return_lse": True},
    "everything": {"mm_prefix": "override_window", "sliding_window": 64, "softcap": 9.0, "alibi": "linear", "sinks": True, "kv_dtype": E4M3},
}
REPRESENTATIVE = [
    ("sm80", "D128", "prefill"),
    ("sm80", "D256", "prefill"),
    ("sm80", "D128 e4m3fn", "decode"),
    ("sm90", "D128", "decode"),
    ("sm90", "D128 e4m3fn", "prefill"),
    ("sm90", "D128 page of 128", "prefill"),
    ("sm90", "D128 page of 128", "long"),
    ("sm90", "D256 page of 64", "decode"),
    ("sm90", "everything", "decode"),
    ("sm100", "packed", "prefill"),
    ("sm120", "page of 256", "decode"),
    ("gfx942", "D512", "decode"),
    ("gfx942", "D128 e4m3fnuz", "prefill"),
    ("gfx950", "D64 fp32", "decode"),
]
EVERY = [
    (target, name, kind)
    for target in TARGETS
    for name in (*DEFAULTS, *FEATURES)
    for kind in KINDS
    if (name in DEFAULTS or kind != "verify") and not (name == "encoder" and kind == "decode")
]
EVERY += [  # what has a tile of its own
    ("sm90", name, "long")
    for name, changes in (DEFAULTS | FEATURES).items()
    if 64 < changes.get("head_size", 128) <= 128 and changes.get("dtype") != FP32 and name != "batch invariant"
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("all_targets", False)
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize(("target", "variant", "kind"), EVERY if every else REPRESENTATIVE)
    elif "target" in metafunc.fixturenames:
        metafunc.parametrize("target", TARGETS if every else ["sm90", "gfx942"])


def test_attention(target, variant, kind, compile_attention):
    changes = {"head_size": 128, "dtype": BF16, "num_q_heads": 32, "num_kv_heads": 8, **(DEFAULTS | FEATURES)[variant]}
    found = compile_attention(target, variant, kind, AttentionSpec(**changes))
    assert found.shared <= found.predicted <= found.limit
    if variant in DEFAULTS and target in WITHOUT_SPILLS:
        assert found.spilled <= (LONG if kind == "long" else FEW if found.bound else 0) and found.beside == 0


@pytest.mark.parametrize("cache", [BF16, FP32, E4M3, E5M2_FNUZ], ids=str)
def test_write_cache(target, cache, recorded, compile_recorded):
    new = torch.zeros(4, 8, 128, dtype=FP32 if cache == FP32 else BF16)
    pool = torch.zeros(4, 16, 8, 128, dtype=torch.uint8).to(cache)
    features = launch.Features(scale=1.0, dtype=new.dtype, page_size=16)
    launch.store((new, new), (pool, pool), torch.zeros(4, dtype=torch.int64), (torch.ones(1), torch.ones(1)), features, {})
    assert compile_recorded(target, recorded["write_cache"]).metadata.shared <= 1024


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_merge_states(target, dtype, recorded, compile_recorded):
    launch.merge_states(torch.zeros(2, 16, 8, 128, dtype=dtype), torch.zeros(2, 16, 8), torch.zeros(8))
    assert compile_recorded(target, recorded["merge"]).metadata.shared <= 64 * 1024


def test_descriptors_are_taken_where_a_page_holds_the_tile(launched):
    spec = AttentionSpec(32, 8, 128, BF16, page_size=128)
    assert launched("sm90", spec)["k_descriptor"].block_shape == [1, 1, 128, 128]
    assert launched("sm90", spec.replace(kv_layout="HND"))["v_descriptor"].strides == [8 * 128 * 128, 128 * 128, 128, 1]
    assert launched("sm80", spec)["k_descriptor"] is None  # no such unit
    assert launched("sm90", spec.replace(page_size=16))["k_descriptor"] is None  # a tile lies in several pages
    assert launched("sm90", spec.replace(kv_dtype=E4M3))["k_descriptor"] is None  # bytes pass through registers
    assert launched("sm90", spec.replace(mm_prefix="override_window"))["k_descriptor"] is None  # grouped spans

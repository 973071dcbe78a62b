"""Selection beside vLLM 0.33's: where both have the backend they agree, or docs/orders.md says why not.

vLLM's side was read in its 0.33.0 release: ``platforms/cuda.py`` (the priorities) and ``supports_*`` of each backend. It picks one backend for a
whole batch; the entries are those that its checks leave, best first, as far down as attnmux has none of the ones before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import attnmux
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.selector import decide
from attnmux.dispatch.steering import Steered

PAGE = Path(__file__).parents[2] / "docs" / "orders.md"
ARCHS = {"sm100": "SM100", "sm90": "SM90", "sm80": "SM80"}
HAVE = {  # vLLM's names -> ours on each architecture; FLASH_ATTN is FlashAttention-2 before Hopper, which attnmux does not have
    "FLASH_ATTN": {"sm100": ("flash_attn_4",), "sm90": ("flash_attn_3", "flash_attn_4"), "sm80": ()},
    "FLASHINFER": dict.fromkeys(ARCHS, ("flashinfer",)),
    "TRITON_ATTN": dict.fromkeys(ARCHS, ("triton",)),
}
COMPOSITE = {"TRITON_FLASHINFER": "FLASHINFER", "TRITON_FLASH_ATTN": "FLASH_ATTN"}  # image rows to TRITON_ATTN, the rest to this
SPANS = {"mm_prefix": "override_window"}
OSS = {"num_q_heads": 64, "head_size": 64, "sinks": True}
WIDE = {"num_q_heads": 16, "page_size": 64}


class Case(NamedTuple):
    """A spec's changes, and what vLLM picks for it on SM100, SM90 and SM80."""

    changes: dict[str, Any]
    sm100: str
    sm90: str
    sm80: str


CASES = {
    "plain": Case({}, "FLASHINFER", "FLASH_ATTN", "FLASH_ATTN FLASHINFER"),
    "window": Case({"sliding_window": 1024}, "FLASHINFER", "FLASH_ATTN", "FLASH_ATTN FLASHINFER"),
    "sinks": Case(OSS, "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"),
    "sinks, window 128": Case({**OSS, "sliding_window": 128}, "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"),
    "fp32": Case({"dtype": torch.float32}, "TRITON_ATTN", "TRITON_ATTN", "TRITON_ATTN"),
    "head size 80": Case({"head_size": 80}, "FLASH_ATTN", "FLASH_ATTN", "FLASH_ATTN TRITON_ATTN"),
    "head size 256": Case({**WIDE, "head_size": 256}, "FLASHINFER", "FLASH_ATTN", "FLASH_ATTN FLASHINFER"),
    "head size 512": Case({**WIDE, "head_size": 512}, "FLASHINFER", "FLASH_ATTN", "FLASH_ATTN FLASHINFER"),
    "fp8 keys": Case({"kv_dtype": torch.float8_e4m3fn, "kv_scale": "tensor"}, "FLASHINFER", "FLASH_ATTN", "FLASHINFER"),
    "not causal": Case({"causal": False}, "FLASH_ATTN", "FLASH_ATTN", "FLASH_ATTN FLASHINFER"),
    "ALiBi, square root": Case({"alibi": "sqrt"}, "TRITON_ATTN", "TRITON_ATTN", "TRITON_ATTN"),
    "R-SWA": Case({"rswa_window": 128}, "FLASH_ATTN", "FLASH_ATTN", "FLASH_ATTN TRITON_ATTN"),
    "batch invariant": Case({"batch_invariant": True}, "FLASH_ATTN", "FLASH_ATTN", "FLASH_ATTN TRITON_ATTN"),
    "spans": Case(SPANS, "FLASH_ATTN", "TRITON_ATTN", "TRITON_ATTN"),
    "spans, window": Case({**SPANS, "sliding_window": 1024}, "FLASH_ATTN", "TRITON_ATTN", "TRITON_ATTN"),
    "spans, fp32": Case({**SPANS, "dtype": torch.float32}, "TRITON_ATTN", "TRITON_ATTN", "TRITON_ATTN"),
    "spans, head size 256": Case({**SPANS, **WIDE, "head_size": 256}, "TRITON_FLASHINFER", "TRITON_FLASH_ATTN", "TRITON_ATTN"),
    "spans, head size 512": Case({**SPANS, **WIDE, "head_size": 512}, "TRITON_FLASHINFER", "TRITON_FLASH_ATTN", "TRITON_ATTN"),
}
WHY = {
    "a": "Triton was the fastest, or within 1 % of it, in every decode that was measured ([speed](performance.md#choosing)).",
    "b": "Measured: with sinks in a window of 128 Triton took 77 us, FlashAttention-4 94.",
    "c": "Rows are routed one by one: text rows of a model with images keep the backend that is fastest for text.",
    "d": "vLLM takes its own build of FlashAttention-4 there; that of the package index stops at head size 256, as does FlashAttention-3.",
    "e": "FlashAttention-3 reads fp8 keys with fp8 queries only, and rounds the weights to fp8; a 16-bit query is not quantised unasked.",
    "f": "Only Triton's kernel skips the gap between the prefix and the window.",
    "g": "Only Triton's kernels claim that the bits of a row depend on that row alone.",
    "h": "Spans through FlashAttention-4's mask functions are not claimed.",
    "i": "Vendor kernels tile head sizes in steps of 32 or 64; not measured yet.",
}
DIFFERENCES = {
    **{("sm90", what, "decode"): "a" for what in ("plain", "window", "sinks", "sinks, window 128", "head size 256", "head size 512", "not causal", "spans, head size 256", "spans, head size 512")},
    ("sm90", "sinks, window 128", "prefill"): "b",
    ("sm90", "head size 512", "prefill"): "d",
    ("sm90", "spans, head size 512", "prefill"): "d",
    **{("sm90", what, "prefill"): "c" for what in ("spans", "spans, window")},
    **{("sm80", what, c): "c" for what in ("spans", "spans, window", "spans, head size 256", "spans, head size 512") for c in ("prefill", "decode")},
    **{("sm100", what, c): "c" for what in ("spans", "spans, window") for c in ("prefill", "decode")},
    **{("sm100", what, "image"): "h" for what in ("spans", "spans, window")},
    **{("sm90", "fp8 keys", c): "e" for c in ("prefill", "decode")},
    **{(arch, "R-SWA", c): "f" for arch in ("sm100", "sm90") for c in ("prefill", "decode")},
    **{(arch, "batch invariant", c): "g" for arch in ("sm100", "sm90") for c in ("prefill", "decode")},
    **{(arch, "head size 80", c): "i" for arch in ("sm100", "sm90") for c in ("prefill", "decode")},
}  # fmt: skip


def routes(arch: str, what: str) -> dict[str, str]:
    catalog = Registry(entry_points=False).catalog
    plain = {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    spec = attnmux.AttentionSpec(**{**plain, **CASES[what].changes})
    return dict(decide(spec, resolve(f"cuda:{arch}", catalog, ()), "exact", catalog, Toolchain(), Steered()).routes)


def theirs(arch: str, what: str, row_class: str) -> tuple[str, ...]:
    """Our names of what vLLM picks for a class."""
    for name in getattr(CASES[what], arch).split():
        part = name if name not in COMPOSITE else "TRITON_ATTN" if row_class == "image" else COMPOSITE[name]
        if found := HAVE[part][arch]:
            return found
    raise AssertionError(f"{what} on {arch}: nothing that attnmux has")


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_routes_agree_or_the_difference_has_its_reason(arch: str, what: str) -> None:
    found = {c: name in theirs(arch, what, c) for c, name in routes(arch, what).items()}
    assert {c: agrees or (arch, what, c) in DIFFERENCES for c, agrees in found.items()} == dict.fromkeys(found, True)
    stale = [c for c, agrees in found.items() if agrees and (arch, what, c) in DIFFERENCES]
    assert not stale, "no difference any more"


def test_every_difference_is_of_a_case() -> None:
    asked = {(arch, what, c) for arch in ARCHS for what in CASES for c in routes(arch, what)}
    assert set(DIFFERENCES) <= asked
    assert set(DIFFERENCES.values()) == set(WHY)


def table() -> str:
    lines = ["| asked | " + " | ".join(f"{title}: vLLM | attnmux" for title in ARCHS.values()) + " |", "|---" * 7 + "|"]
    for what, case in CASES.items():
        cells = []
        for arch in ARCHS:
            ours = [
                f"{c} {name}" + (f" ({DIFFERENCES[arch, what, c]})" if (arch, what, c) in DIFFERENCES else "")
                for c, name in routes(arch, what).items()
            ]
            cells += [getattr(case, arch).replace(" ", ", else "), ", ".join(ours)]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- ({letter}) {why}" for letter, why in WHY.items())]) + "\n"


def test_the_page_holds_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(table()), "write table() to the end of docs/orders.md"

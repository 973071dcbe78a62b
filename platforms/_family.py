"""What the platform modules share: limits and features from data sheets, the family's leading rules, visible-device lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.dispatch.constraints import ON, Not, OneOf, Range
from attnmux.dispatch.platform import Order, when

KIB = 1024

BF16 = frozenset({"bf16"})
FP8_OCP = frozenset({"fp8_e4m3fn", "fp8_e5m2"})
"""The formats of the Open Compute Project: NVIDIA from sm89 on, AMD from gfx950 on."""
FP8_FNUZ = frozenset({"fp8_e4m3fnuz", "fp8_e5m2fnuz"})
"""The formats of AMD's MI300, without a negative zero."""


def triton_first(*others: str) -> tuple[Order, ...]:
    """The rules that lead on every GPU: what Triton's kernels alone are built for, then ``others``."""
    names = ("triton", *others)
    return (
        Order(names, "no vendor kernel has ALiBi in its square-root form", when(alibi=OneOf("sqrt"))),
        Order(names, "only Triton's kernel skips the gap between the prefix and the window of R-SWA", when(rswa_window=ON)),
        Order(names, "fp32 means fp32: vendor kernels take 16-bit and fp8 inputs only", when(dtype=OneOf(torch.float32))),
        Order(names, "vendor kernels tile head sizes from 64 on in steps of 32", when(head_size=Not(Range(64, of=32)))),
    )


def spans_first(*others: str) -> Order:
    """Image rows go to Triton, then ``others``."""
    return Order(
        ("triton", *others),
        "spans: Triton computes their mask in place; FlashInfer's range wrapper, an fa2 kernel on every GPU, took 4.3 times as long: 1354 us"
        " against 318 for 4k tokens at head size 256 (H200, 2026-11-30), and FlexAttention builds a block mask a step",
        when(row_class="image"),
    )


def sinks_before_hopper(*others: str) -> Order:
    """Sinks go to Triton on NVIDIA GPUs older than Hopper."""
    return Order(
        ("triton", *others),
        "before Hopper the only other fast kernel with sinks is a FlashInfer variant, without softcap; Triton has both",
        when(sinks=ON),
    )


def visible(setting: str | None, uuids: Sequence[str]) -> list[int]:
    """The physical devices that a ``*_VISIBLE_DEVICES`` setting leaves, in its order, the way the CUDA runtime reads it.

    Args:
        setting: the variable's value; ``None`` when it is not set.
        uuids: one identifier a physical device, ``GPU-...`` or ``MIG-...``.

    Returns:
        Indices into ``uuids``. Entries are indices or unique beginnings of a UUID; the first that fits no device
        ends the list, and a device named twice empties it.
    """
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in setting.split(","):
        index = _index(entry.strip(), uuids)
        if index is None:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _index(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.startswith(("GPU-", "MIG-")):
        fitting = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return fitting[0] if len(fitting) == 1 else None
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]  # like strtoul: "1gpu" is 1
    return int(digits) if digits and int(digits) < len(uuids) else None

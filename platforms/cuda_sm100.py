"""Blackwell for data centres: sm100 and its family up to sm119 (sm103: B300, sm110: Thor)."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.constraints import OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, when
from attnmux.platforms._family import BF16, FP8_OCP, KIB, spans_first, triton_first

attnmux_contract = "1.0"

ORDER = ("flashinfer", "flash_attn_4", "triton", "flex")


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="cuda_sm100",
        devices=DeviceSet("cuda:sm100..sm119"),
        archs={"sm100": Arch("Blackwell (B200, GB200)", 227 * KIB, BF16 | FP8_OCP | {"tma", "tcgen05"})},
        orders=(
            *triton_first("flashinfer", "flash_attn_4", "flex"),
            spans_first("flashinfer", "flash_attn_4", "flex"),
            Order(
                ("flash_attn_4", "flashinfer", "triton", "flex"),
                "FlashInfer's Blackwell kernels are causal; what is not goes to its fa2, which has no tcgen05",
                when(causal=OneOf(False)),
            ),
            Order(ORDER, "FlashInfer brings NVIDIA's own Blackwell kernels; FlashAttention-4 takes head sizes that it refuses"),
        ),
        probe="attnmux.platforms._nvml:probe",
    )

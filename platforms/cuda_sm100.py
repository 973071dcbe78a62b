"""Blackwell for data centres: sm100 and its family up to sm119 (sm103: B300, sm110: Thor)."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.constraints import ON, OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, when
from attnmux.platforms._family import BF16, FP8_OCP, KIB, triton_first

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
            Order(
                ("triton_flashinfer", *ORDER),
                "multimodal spans at head sizes 256 and 512: image rows to Triton, text rows keep FlashInfer",
                when(mm_prefix=ON, head_size=OneOf(256, 512)),
            ),
            Order(ORDER, "FlashInfer brings NVIDIA's own Blackwell kernels; FlashAttention-4 takes head sizes that it refuses"),
        ),
        probe="attnmux.platforms._nvml:probe",
    )

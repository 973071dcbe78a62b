"""Hopper: sm90. Its orders differ by row class, after measurements on an H200."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, when
from attnmux.platforms._family import BF16, FP8_OCP, KIB, triton_first

attnmux_contract = "1.0"


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="cuda_sm90",
        devices=DeviceSet("cuda:sm90"),
        archs={"sm90": Arch("Hopper (H100, H200)", 227 * KIB, BF16 | FP8_OCP | {"tma", "wgmma"})},
        orders=(
            *triton_first("flash_attn_4", "flash_attn_3", "flashinfer", "flex"),
            Order(
                ("triton", "flex"),
                "spans: Triton computes their mask in place, FlexAttention builds one a step",
                when(row_class="image"),
            ),
            Order(
                ("triton", "flash_attn_3", "flashinfer", "flex"),
                "decode wants split keys, which FlashAttention-4 lacks on Hopper: 331 us against FlashAttention-3's 259"
                " at 128 x 2k, 54 against 14 at 1 x 4k (H200, 2026-11-29)",
                when(row_class="decode"),
            ),
            Order(
                ("flash_attn_4", "flash_attn_3", "flashinfer", "triton", "flex"),
                "FlashAttention leads in prefill: version 4 takes 12.6 us at 500 tokens and 269 at 4k, version 3 takes 15.1"
                " and 267, FlashInfer 15.1 and 308 (H200, 2026-11-29)",
                when(row_class="prefill"),
            ),
        ),
        probe="attnmux.platforms._nvml:probe",
    )

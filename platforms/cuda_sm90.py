"""Hopper: sm90. Its orders differ by row class, after measurements on an H200."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.constraints import ON, Range
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, when
from attnmux.platforms._family import BF16, FP8_OCP, KIB, spans_first, triton_first

attnmux_contract = "1.0"


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="cuda_sm90",
        devices=DeviceSet("cuda:sm90"),
        archs={"sm90": Arch("Hopper (H100, H200)", 227 * KIB, BF16 | FP8_OCP | {"tma", "wgmma"})},
        orders=(
            *triton_first("flash_attn_4", "flash_attn_3", "flashinfer", "flex"),
            spans_first("flashinfer", "flex"),
            Order(
                ("triton", "flash_attn_3", "flashinfer", "flex"),
                "decode wants split keys, which FlashAttention-4 lacks on Hopper: 250 us in Triton at 128 x 2k, 264 in FlashInfer, 323 in"
                " FlashAttention-3, 359 in 4. FlashInfer comes behind FlashAttention-3, which is slower in even batches, because of uneven ones:"
                " 94, 285, 112 and 538 with one long row among short ones (H200, 2026-11-30)",
                when(row_class="decode"),
            ),
            Order(
                ("triton", "flash_attn_4", "flash_attn_3", "flashinfer", "flex"),
                "sinks in a short window: 77 us in Triton against 94 in FlashAttention-4 and 99 in 3 for 4k tokens, window 128 (H200, 2026-11-30)",
                when(row_class="prefill", sinks=ON, sliding_window=Range(1, 256)),
            ),
            Order(
                ("flash_attn_4", "flash_attn_3", "flashinfer", "triton", "flex"),
                "FlashAttention leads in prefill: version 4 takes 14.3 us at 500 tokens, 276 at 4k and 240 there at head size 256, version 3"
                " takes 17.0, 269 and 271, FlashInfer 15.2, 312 and 374 (H200, 2026-11-30)",
                when(row_class="prefill"),
            ),
        ),
        probe="attnmux.platforms._nvml:probe",
    )

"""FlashAttention-4 (CuTe DSL): Hopper and Blackwell for data centres. On other GPUs it has no paged kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.backends._flash_attn_claims import PAGED
from attnmux.dispatch.claims import BackendInfo, TestedOn
from attnmux.dispatch.constraints import ANY, Not, OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

# A page as long as a key tile is loaded whole, and what lies behind a row's last value is multiplied by 0. On Hopper the adapter then asks for
# shorter tiles, on Blackwell (tiles of 128) such a page is refused.
HOPPER = replace(PAGED, softcap=ANY)
BLACKWELL = replace(HOPPER, device=DeviceSet("cuda:sm100..sm119"), head_size=OneOf(64, 80, 96, 112, 128, 256), page_size=Not(OneOf(128)))
CLAIMS = (HOPPER, BLACKWELL, replace(BLACKWELL, head_size=OneOf(192), v_head_size=OneOf(128)))


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="flash_attn_4",
        summary="FlashAttention-4 (CuTe DSL) for Hopper and Blackwell",
        claims=CLAIMS,
        implementation="attnmux.backends.flash_attn_4_backend:FlashAttn4Backend",
        requires=(Package("flash-attn-4", ">=4.0.0b36", "attnmux[flash-attn]"),),
        graphs=("prefill", "decode"),
        tested_on=(TestedOn("cuda:sm90", "H200", "2026-11-30", "flash-attn-4 4.0.0b36, torch 2.11"),),
    )

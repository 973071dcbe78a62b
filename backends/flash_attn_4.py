"""FlashAttention-4 (CuTe DSL): Hopper and Blackwell for data centres. On other GPUs it has no paged kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.backends._claims import ATTN_TYPES, HALF, LENGTHS, TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import ANY, YES_OR_NO, AnyOf, OneOf, Range
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

HOPPER = Claim(
    device=DeviceSet("cuda:sm90"),
    row_class=TEXT_ROWS,
    lengths=LENGTHS,
    head_size=Range(8, 256, of=8),
    dtype=HALF,
    # A page as long as a key tile (128 and its neighbours) is loaded whole, and needs finite memory behind the last key,
    # which a pool does not promise. Packed keys are pages of one.
    page_size=OneOf(None, 16, 32, 64, 256),
    attn_type=ATTN_TYPES,
    causal=YES_OR_NO,
    sliding_window=ANY,
    window_right=ANY,
    softcap=ANY,
    sinks=YES_OR_NO,
    return_lse=YES_OR_NO,
)
BLACKWELL = replace(HOPPER, device=DeviceSet("cuda:sm100..sm119"), head_size=AnyOf(Range(8, 128, of=8), OneOf(256)))
CLAIMS = (HOPPER, BLACKWELL, replace(BLACKWELL, head_size=OneOf(192), v_head_size=OneOf(128)))


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="flash_attn_4",
        summary="FlashAttention-4 (CuTe DSL) for Hopper and Blackwell",
        claims=CLAIMS,
        implementation=None,
        requires=(Package("flash-attn-4", ">=4.0.0b36", "attnmux[flash-attn]"),),
        graphs=("prefill", "decode"),
    )

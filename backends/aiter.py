"""AMD's AITER: no platform's order names it, because its only wheel is a snapshot of 2025-11; prefer or require it."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.backends._claims import HALF, TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import ANY, YES_OR_NO, OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

DEVICES = DeviceSet("rocm:gfx942", "rocm:gfx950")
CLAIMS = (
    # unified_attention: causal over pages, without LSE
    Claim(
        device=DEVICES,
        row_class=TEXT_ROWS,
        head_size=OneOf(64, 128, 256),
        dtype=HALF,
        page_size=OneOf(16, 32, 64, 128),
        sliding_window=ANY,
        softcap=ANY,
        alibi=OneOf(None, "linear"),
        sinks=YES_OR_NO,
    ),
    # flash_attn_varlen_func: packed keys, both ways too, with LSE but without sinks
    Claim(
        device=DEVICES,
        row_class=TEXT_ROWS,
        head_size=OneOf(64, 128),
        dtype=HALF,
        page_size=OneOf(None),
        attn_type=OneOf("decoder", "encoder_only", "cross"),
        causal=YES_OR_NO,
        softcap=ANY,
        return_lse=YES_OR_NO,
    ),
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="aiter",
        summary="AMD's AITER kernels for MI300 and MI350",
        claims=CLAIMS,
        implementation=None,
        requires=(Package("amd-aiter"),),
    )

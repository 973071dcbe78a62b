"""FlashAttention-3: Hopper only, prefill and split-key decode over pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from attnmux.backends._claims import ATTN_TYPES, HALF, LAYOUTS, LENGTHS, TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import ANY, YES_OR_NO, OneOf, Range
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

# The wheel that is on the package index leaves out softcap, head size 96 and values of another size than keys.
SIXTEEN_BIT = Claim(
    device=DeviceSet("cuda:sm90"),
    row_class=TEXT_ROWS,
    lengths=LENGTHS,
    head_size=OneOf(64, 128, 192, 256),
    dtype=HALF,
    page_size=Range(16, of=16, optional=True),  # packed keys are pages of one
    kv_layout=LAYOUTS,
    attn_type=ATTN_TYPES,
    causal=YES_OR_NO,
    sliding_window=ANY,
    window_right=ANY,
    sinks=YES_OR_NO,
    return_lse=YES_OR_NO,
)
CLAIMS = (
    # fp8 keys and values only meet fp8 queries; the output is bf16
    replace(
        SIXTEEN_BIT,
        dtype=OneOf(torch.bfloat16),
        q_dtype=OneOf(torch.float8_e4m3fn),
        kv_dtype=OneOf(torch.float8_e4m3fn),
        kv_scale=OneOf(None, "tensor", "head"),
    ),
    SIXTEEN_BIT,
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="flash_attn_3",
        summary="FlashAttention-3 for Hopper",
        claims=CLAIMS,
        implementation=None,
        requires=(Package("tokenspeed-fa3", ">=3"),),
        graphs=("prefill", "decode"),
    )

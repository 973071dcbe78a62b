"""FlashAttention-3: Hopper only, prefill and split-key decode over pages."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.backends._flash_attn_claims import PAGED
from attnmux.dispatch.claims import BackendInfo, TestedOn
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

# Any page size: with leftpad_k given the kernel never takes its TMA path, which multiplies what lies behind a row's last value by 0.
# The build on the package index leaves out softcap, and values of another size than keys; it rounds head sizes up to 64, 128, 192 or 256.
# fp8 keys are not claimed: with them the kernel also rounds the softmax weights to fp8, far beyond one rounding of the output.
CLAIMS = (PAGED,)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="flash_attn_3",
        summary="FlashAttention-3 for Hopper",
        claims=CLAIMS,
        implementation="attnmux.backends.flash_attn_3_backend:FlashAttn3Backend",
        # upstream's own builds, from source, are called flash_attn_3; on the package index that name is an empty 0.0.0
        requires=(Package("tokenspeed-fa3", ">=3.0.0b1", also=("flash_attn_3",)),),
        graphs=("prefill", "decode"),
        tested_on=(TestedOn("cuda:sm90", "H200", "2026-11-30", "tokenspeed-fa3 3.0.0.post20260810, torch 2.11"),),
    )

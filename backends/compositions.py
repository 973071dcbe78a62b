"""Registered compositions: a name for a {row class: backend} map over one KV cache."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.claims import Composition
from attnmux.dispatch.hookspecs import hookimpl

attnmux_contract = "1.0"


@hookimpl
def attnmux_compositions() -> Iterable[Composition]:
    yield Composition(
        "triton_flashinfer",
        {"image": "triton", "prefill": "flashinfer", "decode": "flashinfer"},
        "Triton for rows with spans, FlashInfer for text",
    )
    yield Composition(
        "triton_flash_attn_3",
        {"image": "triton", "prefill": "flash_attn_3", "decode": "triton"},
        "FlashAttention-3 for prefill, Triton for the rest",
    )
    yield Composition(
        "triton_flash_attn_4",
        {"image": "triton", "prefill": "flash_attn_4", "decode": "triton"},
        "FlashAttention-4 for prefill, Triton for the rest",
    )

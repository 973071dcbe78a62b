"""What both FlashAttention declarations say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnmux.backends._claims import ATTN_TYPES, HALF, LAYOUTS, LENGTHS, TEXT_ROWS
from attnmux.dispatch.claims import Claim
from attnmux.dispatch.constraints import ANY, YES_OR_NO, OneOf, Range
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.query import Query


@dataclass(frozen=True, slots=True)
class Positive:
    """A number above 0. The running maximum is of unscaled scores, which under a negative scale is the minimum."""

    def accepts(self, value: Any, query: Query) -> bool:
        return isinstance(value, int | float) and value > 0

    def wants(self) -> str:
        return "a number above 0"

    def cell(self) -> str:
        return "> 0"


# Head sizes of models; a multiple of 16 each: FlashAttention-4 refuses others over pages, and both work in steps of 16.
HEAD_SIZES = OneOf(64, 80, 96, 112, 128, 192, 256)

PAGED = Claim(
    device=DeviceSet("cuda:sm90"),
    row_class=TEXT_ROWS,
    lengths=LENGTHS,
    head_size=HEAD_SIZES,
    dtype=HALF,
    scale=Positive(),
    page_size=Range(1, optional=True),  # packed keys are pages that overlap
    kv_layout=LAYOUTS,
    attn_type=ATTN_TYPES,
    causal=YES_OR_NO,
    sliding_window=ANY,
    window_right=ANY,
    sinks=YES_OR_NO,
    return_lse=YES_OR_NO,
)

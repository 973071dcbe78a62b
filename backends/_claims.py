"""Constraints that several declarations share."""

from __future__ import annotations

import torch

from attnmux.dispatch.claims import Claim
from attnmux.dispatch.constraints import ANY, YES_OR_NO, Constraint, OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.requirements import Requirement

HALF = OneOf(torch.bfloat16, torch.float16)
TEXT_ROWS = OneOf("prefill", "decode")
LAYOUTS = OneOf("NHD", "HND")
LENGTHS = OneOf("exact", "upper_bound")
"""For kernels that read key lengths on the device and use the host's only to size their launch."""
ATTN_TYPES = OneOf("decoder", "encoder_only", "cross")


def every_mask(
    device: DeviceSet, *, head_size: Constraint, dtype: Constraint, page_size: Constraint, requires: tuple[Requirement, ...] = ()
) -> Claim:
    """A claim with every attention type, mask, score modification and row class, for kernels that compute them all."""
    return Claim(
        device=device,
        lengths=LENGTHS,
        head_size=head_size,
        dtype=dtype,
        page_size=page_size,
        attn_type=ATTN_TYPES,
        causal=OneOf(True, False, "per_sequence"),
        sliding_window=ANY,
        window_right=ANY,
        chunk=ANY,
        softcap=ANY,
        alibi=ANY,
        sinks=YES_OR_NO,
        mm_prefix=ANY,
        rswa_window=ANY,
        return_lse=YES_OR_NO,
        requires=requires,
    )

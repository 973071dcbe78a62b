"""A spec's masks as the kernels take them."""

from __future__ import annotations

from attnmux.dispatch.spec import AttentionSpec
from attnmux.kernels.masks import Sight


def sight_of(spec: AttentionSpec) -> Sight:
    """Which keys a token sees under ``spec``; causality is the row's and stays apart."""
    return Sight(
        positions=spec.attn_type != "cross",
        window=spec.sliding_window,
        window_right=spec.window_right,
        chunk=spec.chunk,
        mm_prefix=spec.mm_prefix,
        rswa_window=spec.rswa_window,
    )

"""The optional features of a spec, each with its controls: what a backend that ignores or mistakes it would compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnmux.dispatch.spec import DTYPE_NAMES, FP8_DTYPES

Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature as a change of a spec.

    Args:
        name: as it appears in check ids.
        on: fields that ask for it.
        controls: changes that undo or mistake it; each must change the oracle's answer, or the case proves nothing.
        paired: whether numerics also combines it with every other feature.
        image_only: the controls change only rows that lie in a span.
    """

    name: str
    on: Changes
    controls: tuple[Changes, ...] = ()
    paired: bool = True
    image_only: bool = False


WINDOW = {"sliding_window": 5}
NO_WINDOW = {"sliding_window": None}

MASKS = (
    Feature("sliding_window", WINDOW, (NO_WINDOW, {"sliding_window": 4}, {"sliding_window": 6})),
    Feature("window_of_one", {"sliding_window": 1}, ({"sliding_window": 2},), paired=False),
    Feature("window_right", {**WINDOW, "causal": False, "window_right": 1}, ({"window_right": None}, {"window_right": 0})),
    Feature("window_both_ways", {**WINDOW, "causal": False}, (NO_WINDOW, {"causal": True}), paired=False),
    Feature("chunk", {"chunk": (8, 0)}, ({"chunk": None}, {"chunk": (8, 1)})),
    Feature("chunk_lookback", {"chunk": (8, 1)}, ({"chunk": None}, {"chunk": (8, 0)}), paired=False),
    Feature("mm_prefix_override", {"mm_prefix": "override_window"}, ({"mm_prefix": None},), image_only=True),
    Feature(
        "mm_prefix_override_window", {"mm_prefix": "override_window", **WINDOW}, ({"mm_prefix": "within_window"},), paired=False, image_only=True
    ),
    Feature(
        "mm_prefix_within_window", {"mm_prefix": "within_window", **WINDOW}, ({"mm_prefix": "override_window"}, {"mm_prefix": None}), image_only=True
    ),
    Feature("rswa", {"rswa_window": 4}, ({"rswa_window": None}, {"rswa_window": None, "sliding_window": 4}, {"rswa_window": 5})),
    Feature("not_causal", {"causal": False}, ({"causal": True},)),
    Feature("causal_per_sequence", {"causal": "per_sequence"}, ({"causal": True}, {"causal": False})),
    Feature("encoder_only", {"attn_type": "encoder_only", "causal": None}, ({"attn_type": "decoder", "causal": True},)),
    Feature("cross", {"attn_type": "cross", "causal": None}),
)
SCORES = (
    Feature("scale", {"scale": 0.31}, ({"scale": None},), paired=False),
    Feature("softcap", {"softcap": 2.0}, ({"softcap": None},)),
    Feature("alibi_linear", {"alibi": "linear"}, ({"alibi": None}, {"alibi": "sqrt"})),
    Feature("alibi_sqrt", {"alibi": "sqrt"}, ({"alibi": None}, {"alibi": "linear"})),
    Feature("sinks", {"sinks": True}, ({"sinks": False},)),
)
LAYOUTS = (
    Feature("packed", {"page_size": None}),
    Feature("hnd", {"kv_layout": "HND"}),
    Feature("return_lse", {"return_lse": True}),
    Feature("batch_invariant", {"batch_invariant": True}),
)


def _quantised() -> tuple[Feature, ...]:
    found = []
    for i, dtype in enumerate(FP8_DTYPES):
        name = DTYPE_NAMES[dtype]
        found += [
            Feature(f"kv_{name}", {"kv_dtype": dtype}, paired=False),
            Feature(f"kv_{name}_by_tensor", {"kv_dtype": dtype, "kv_scale": "tensor"}, ({"kv_scale": None},), paired=False),
            Feature(f"kv_{name}_by_head", {"kv_dtype": dtype, "kv_scale": "head"}, ({"kv_scale": None}, {"kv_scale": "tensor"}), paired=i == 0),
            Feature(f"q_{name}", {"q_dtype": dtype}, paired=False),
        ]
    return tuple(found)


FEATURES: tuple[Feature, ...] = (*MASKS, *SCORES, *LAYOUTS, *_quantised())

"""Rows of a batch: ragged, mixed, with everything that is easily got wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from attnmux.dispatch.spec import AttentionSpec, RowClass


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch: query tokens, keys, and what the spec may ask of a row.

    Args:
        q_len, kv_len: query tokens and keys (the new ones included).
        spans: ``(start, end)`` or ``(start, end, group)``, used where the spec has ``mm_prefix``.
        prefix_len: used where the spec has ``rswa_window``.
        causal: used where the spec says ``"per_sequence"``.
    """

    q_len: int
    kv_len: int
    spans: tuple[tuple[int, ...], ...] = ()
    prefix_len: int = 6
    causal: bool = True


_DECODER_ROWS: dict[RowClass, tuple[Row, ...]] = {
    "decode": (
        Row(1, 37),
        Row(3, 20, prefix_len=50, causal=False),
        Row(0, 9),
        Row(16, 41, spans=((2, 11),)),
        Row(1, 1, causal=False),
        Row(2, 0),
    ),
    "prefill": (Row(17, 17), Row(35, 70, causal=False), Row(18, 0), Row(21, 40, spans=((3, 12),), prefix_len=0)),
    "image": (
        Row(24, 40, spans=((2, 9), (20, 33))),
        Row(1, 30, spans=((21, 30),)),
        Row(30, 30, spans=((2, 11, 0), (14, 25, 0), (26, 28, 1)), causal=False),
        Row(6, 30, spans=((3, 9, 1), (24, 29, 1), (60, 70))),
    ),
}
_ENCODER_ROWS = (Row(9, 9), Row(33, 33, causal=False), Row(0, 5), Row(1, 1), Row(4, 0))
_CROSS_ROWS: dict[RowClass, tuple[Row, ...]] = {
    "decode": (Row(1, 30), Row(12, 7), Row(0, 4), Row(3, 0)),
    "prefill": (Row(20, 9), Row(17, 40)),
}
_LONG_ROWS: dict[RowClass, tuple[Row, ...]] = {
    "decode": (Row(1, 1500), Row(7, 523)),
    "prefill": (Row(150, 700), Row(260, 260)),
    "image": (Row(200, 500, spans=((310, 440),)),),
}


def mixed_rows(spec: AttentionSpec, classes: Sequence[RowClass] | None = None, *, long: bool = False) -> tuple[Row, ...]:
    """Ragged rows of the given classes (by default all of the spec's), interleaved, with rows of q_len 0 and of seq_len 0."""
    wanted = spec.row_classes if classes is None else tuple(classes)
    if spec.attn_type == "encoder_only":
        parts = [tuple(dataclasses.replace(row, q_len=row.kv_len) for row in _LONG_ROWS["prefill"]) if long else _ENCODER_ROWS]
    else:
        table = _LONG_ROWS if long else _CROSS_ROWS if spec.attn_type == "cross" else _DECODER_ROWS
        parts = [table[c] for c in wanted]
    depth = max(map(len, parts), default=0)
    return tuple(part[i] for i in range(depth) for part in parts if i < len(part))

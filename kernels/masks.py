"""Which keys a token sees: small mask functions, and the key ranges that a run of tokens sees.

``d = q_pos - k_pos`` throughout. Mask functions take int64 tensors that broadcast, usually positions ``[..., q_len, 1]``
and ``[..., 1, kv_len]``, and return bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Span = tuple[int, int, int | None]
"""Half-open positions ``[start, end)`` and the group that shares sight with them (``None``: this span alone)."""


def up_to(q_pos: Tensor, k_pos: Tensor, reach: int = 0) -> Tensor:
    """Causal, or with ``reach`` keys to the right: ``-d <= reach``."""
    return k_pos - q_pos <= reach


def within_window(q_pos: Tensor, k_pos: Tensor, size: int) -> Tensor:
    """``d < size``: ``size`` keys up to the token, itself included."""
    return q_pos - k_pos < size


def within_chunks(q_pos: Tensor, k_pos: Tensor, size: int, lookback: int) -> Tensor:
    """``q_pos // size - k_pos // size <= lookback``."""
    return q_pos.div(size, rounding_mode="floor") - k_pos.div(size, rounding_mode="floor") <= lookback


def same_span(q_pos: Tensor, k_pos: Tensor, spans: Sequence[Span]) -> Tensor:
    """Both positions lie in one span, or in spans of one group."""
    seen = torch.zeros((), dtype=torch.bool, device=q_pos.device)
    for family in span_families(spans):
        seen = seen | (_inside(q_pos, family) & _inside(k_pos, family))
    return seen


def prefix_or_window(q_pos: Tensor, k_pos: Tensor, prefix_len: Tensor | int, size: int) -> Tensor:
    """R-SWA: ``d >= 0 and (k_pos < prefix_len or d < size)``."""
    return up_to(q_pos, k_pos) & ((k_pos < prefix_len) | within_window(q_pos, k_pos, size))


def span_families(spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
    """Spans that see each other: one list a group, one a span without a group."""
    families: dict[object, list[tuple[int, int]]] = {}
    for i, (start, end, group) in enumerate(spans):
        families.setdefault(("alone", i) if group is None else group, []).append((start, end))
    return list(families.values())


def _inside(pos: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    found = torch.zeros_like(pos, dtype=torch.bool)
    for start, end in ranges:
        found |= (pos >= start) & (pos < end)
    return found


@dataclass(frozen=True, slots=True)
class Sight:
    """What tokens of a layer may see. A token at ``q_pos`` of a row of ``seq_len`` keys sees key ``k_pos`` when all hold that apply.

    Args:
        positions: ``False`` for cross-attention, where every token sees every key.
        window: ``d < window``.
        window_right: where not causal ``-d <= window_right``; ``None``: ``window - 1`` with a window, no bound without.
        chunk: ``(size, lookback)``.
        mm_prefix: how spans combine with the rest: ``"override_window"`` ``(ahead and recent) or same_span``,
            ``"within_window"`` ``(ahead or same_span) and recent``, where ahead is the bound to the right and recent the
            bounds to the left (window and chunk).
        rswa_window: window of R-SWA, which is causal and excludes the four above.
    """

    positions: bool = True
    window: int | None = None
    window_right: int | None = None
    chunk: tuple[int, int] | None = None
    mm_prefix: Literal["override_window", "within_window"] | None = None
    rswa_window: int | None = None

    @property
    def reach(self) -> int | None:
        """Keys seen to the right where not causal; ``None`` is no bound."""
        return self.window_right if self.window_right is not None or self.window is None else self.window - 1

    def mask(
        self, q_pos: Tensor, k_pos: Tensor, causal: Tensor | bool, seq_len: Tensor | int, spans: Sequence[Span] = (), prefix_len: Tensor | int = 0
    ) -> Tensor:
        """Bool, broadcast of ``q_pos [..., q_len, 1]`` and ``k_pos [..., 1, kv_len]``.

        ``causal``, ``seq_len`` and ``prefix_len`` belong to the row: numbers, or tensors ``[..., 1, 1]`` for several rows.
        """
        inside = (k_pos >= 0) & (k_pos < seq_len) & torch.ones_like(q_pos, dtype=torch.bool)
        if not self.positions:
            return inside
        if self.rswa_window is not None:
            return inside & prefix_or_window(q_pos, k_pos, prefix_len, self.rswa_window)
        ahead = up_to(q_pos, k_pos)
        if causal is not True:
            ahead = ahead | ~torch.as_tensor(causal, device=q_pos.device)
            if self.reach is not None:
                ahead = ahead & up_to(q_pos, k_pos, self.reach)
        recent = torch.ones((), dtype=torch.bool, device=q_pos.device)
        if self.window is not None:
            recent = recent & within_window(q_pos, k_pos, self.window)
        if self.chunk is not None:
            recent = recent & within_chunks(q_pos, k_pos, *self.chunk)
        if self.mm_prefix == "override_window":
            return inside & ((ahead & recent) | same_span(q_pos, k_pos, spans))
        if self.mm_prefix == "within_window":
            return inside & (ahead | same_span(q_pos, k_pos, spans)) & recent
        return inside & ahead & recent

    def seen_by_some(
        self, first: int, end: int, causal: bool, seq_len: int, spans: Sequence[Span] = (), prefix_len: int = 0
    ) -> list[tuple[int, int]]:
        """Disjoint ascending key ranges: exactly the keys that some token at positions ``[first, end)`` sees."""
        if not self.positions:
            return _union([(0, seq_len)])
        if self.rswa_window is not None:
            hi = min(end, seq_len)
            return _union([(0, min(prefix_len, hi)), (max(0, first - self.rswa_window + 1), hi)])
        hi = self._right(end - 1, causal, seq_len)
        ranges = [(self._left(first), hi)]
        for family in span_families(spans) if self.mm_prefix else ():
            members = [max(start, first) for start, stop in family if start < end and stop > first]
            if members:
                left = 0 if self.mm_prefix == "override_window" else self._left(min(members))
                ranges += [(max(start, left), min(stop, seq_len)) for start, stop in family]
        return _union(ranges)

    def seen_by_all(self, first: int, end: int, causal: bool, seq_len: int, prefix_len: int = 0) -> list[tuple[int, int]]:
        """Disjoint ascending key ranges that every token at positions ``[first, end)`` sees, spans aside."""
        if not self.positions:
            return _union([(0, seq_len)])
        if self.rswa_window is not None:
            hi = min(first + 1, seq_len)
            return _union([(0, min(prefix_len, hi)), (max(0, end - self.rswa_window), hi)])
        return _union([(self._left(end - 1), self._right(first, causal, seq_len))])

    def _left(self, pos: int) -> int:
        """First key that the window and the chunk leave to the token at ``pos``."""
        left = 0 if self.window is None else pos - self.window + 1
        if self.chunk is not None:
            size, lookback = self.chunk
            left = max(left, (pos // size - lookback) * size)
        return max(left, 0)

    def _right(self, pos: int, causal: bool, seq_len: int) -> int:
        """End of the keys that the token at ``pos`` sees, spans aside."""
        reach = 0 if causal else self.reach
        return seq_len if reach is None else min(seq_len, pos + reach + 1)


UNBOUNDED = Sight()


def _union(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending, disjoint, without empty ones; ranges that touch become one."""
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(r for r in ranges if r[0] < r[1]):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged

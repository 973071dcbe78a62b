"""What a transformers mask function lets tokens see, as rows of a batch. What no spec expresses is refused by name.

transformers composes masks from small index functions (``transformers.masking_utils``). They are read, not evaluated over all
pairs of tokens; then each row's answer is compared with the functions themselves at the edges of what every token sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.errors import complaint

MaskFunction = Callable[..., Any]
_HOME = "transformers.masking_utils"

_REFUSALS = {
    "packed_sequence_mask_function": "several sequences are packed into one row (position_ids restart); pad them and pass attention_mask, "
    "or serve them with attnmux_plan",
}
_INSTEAD = "load the model with attn_implementation='eager' or 'sdpa' for this input"


def refuse(what: str, instead: str = _INSTEAD) -> ValueError:
    """The error for a request that no spec expresses."""
    return ValueError(f"attn_implementation='attnmux' cannot express this attention: {what}; {instead}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a token sees, padding aside.

    Args:
        causal: nothing to its right.
        window: keys it sees to one side, itself included.
        chunk: size of the chunks that keep to themselves, counted from ``chunk_origin``.
        chunk_origin: int ``[batch]``, position of each row's first chunk.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None
    chunk_origin: Tensor | None = None


def read_pattern(mask_function: MaskFunction) -> Pattern:
    """The pattern that a mask function composes.

    Raises:
        ValueError: some part has no counterpart in :class:`AttentionSpec`; the message names it.
    """
    causal, reaches, radii, chunks = False, [], [], []
    for part in _conjuncts(mask_function):
        name, bound = _identify(part)
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            reaches.append(int(bound["sliding_window"]))
        elif name == "sliding_window_bidirectional_overlay":
            radii.append(int(bound["sliding_window"]) + 1)  # a radius leaves the token itself out, a window counts it
        elif name == "chunked_overlay":
            chunks.append((int(bound["chunk_size"]), bound["left_padding"]))
        elif name != "bidirectional_mask_function":
            parts = [_identify(option)[0] for option in bound.get("mask_functions", ())]  # of a union
            raise refuse(_REFUSALS.get(name, f"the mask holds {name}" + (f" of {' and '.join(parts)}" if parts else "")))
    if not causal and (reaches or chunks):
        raise refuse("a window or chunk that only ends on the left")
    if len(chunks) > 1:
        raise refuse("two chunk sizes at once")
    size, origin = chunks[0] if chunks else (None, None)
    return Pattern(causal, min(reaches + radii, default=None), size, origin)


def _conjuncts(mask_function: MaskFunction) -> Iterator[MaskFunction]:
    name, bound = _identify(mask_function)
    if name == "and_masks":
        for part in bound["mask_functions"]:
            yield from _conjuncts(part)
    elif name == "remap_positions_for_packed_sequence":  # always beside packed_sequence_mask_function, which is refused with the reason
        yield from _conjuncts(bound["mask_function"])
    else:
        yield mask_function


def _identify(mask_function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """Name of the transformers function that made it, or its full own name, and the values it closed over."""
    name = str(getattr(mask_function, "__qualname__", repr(mask_function)))
    module = getattr(mask_function, "__module__", None)
    if module != _HOME:
        return f"{module}.{name}", {}
    cells = zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True)
    return name.split(".")[0], {variable: cell.cell_contents for variable, cell in cells}


@dataclass(frozen=True, slots=True)
class Row:
    """A run of query tokens of one batch entry.

    Args:
        owner: the batch entry.
        q_len: query tokens.
        first_key: index of the first key it sees, among the entry's keys.
        num_keys: how many keys it sees; 0 for padding.
    """

    owner: int
    q_len: int
    first_key: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A mask as fields of the spec and rows of the batch.

    Args:
        fields: ``attn_type``, ``sliding_window`` and ``chunk`` of the spec, as sorted pairs.
        rows: in order of the query tokens; together they cover all.
    """

    fields: tuple[tuple[str, Any], ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """One call of a mask function by transformers.

    Args:
        batch_size, q_length, kv_length: shape of the mask.
        q_offset, kv_offset: positions of the first query token and of the first key.
        mask_function: ``(batch, head, q position, k position) -> bool``, all index tensors.
        padding: bool ``[batch, positions]``, False for padding, or ``None``.
        local_size: the window or chunk that transformers names beside the function.
        device: where the index tensors live.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    mask_function: MaskFunction
    padding: Tensor | None
    local_size: int | None
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch and length of the queries, batch and length of the keys."""
        return self.batch_size, self.q_length, self.batch_size, self.kv_length

    def layout(self) -> Layout:
        """The mask as rows. Query tokens that are padding themselves see nothing, as with transformers' flash attention.

        Raises:
            ValueError: the mask has no exact counterpart.
        """
        pattern = read_pattern(self.mask_function)
        own_positions = pattern.causal or pattern.window is not None  # else any query sees all keys, those of an encoder for instance
        if not pattern.causal and own_positions and not (self.q_offset == self.kv_offset == 0 and self.q_length == self.kv_length):
            raise refuse("a bidirectional window over cached keys")
        end = self.q_offset + self.q_length if own_positions else self.kv_offset + self.kv_length
        real = self._real_keys(end, own_positions)
        self._verify(pattern, own_positions, real)
        if not own_positions:
            rows = [Row(b, self.q_length, first - self.kv_offset, stop - first) for b, (first, stop) in enumerate(real)]
            return Layout((("attn_type", "cross"),), tuple(rows))
        origins = [0] * self.batch_size if pattern.chunk_origin is None else pattern.chunk_origin.tolist()
        rows = [row for b, (first, stop) in enumerate(real) for row in self._own_rows(b, first, stop, pattern.chunk, origins[b])]
        chunk = None if pattern.chunk is None else (pattern.chunk, 0)
        attn_type = "decoder" if pattern.causal else "encoder_only"
        return Layout((("attn_type", attn_type), ("chunk", chunk), ("sliding_window", pattern.window)), tuple(rows))

    def _own_rows(self, owner: int, first: int, stop: int, chunk: int | None, origin: int) -> Iterator[Row]:
        """Rows of an entry whose queries have positions among its keys: padding, the tokens, padding."""
        end = self.q_offset + self.q_length
        q_first, q_stop = max(first, self.q_offset), min(stop, end)
        if q_first >= q_stop:
            yield Row(owner, self.q_length, max(first - self.kv_offset, 0), 0)
            return
        if chunk is not None:  # the spec counts chunks from a row's first key
            start = origin + (q_first - origin) // chunk * chunk
            if start < first:
                raise refuse("a chunk whose first keys have left the cache or are padding")
            first = start
        if q_first > self.q_offset:
            yield Row(owner, q_first - self.q_offset, first - self.kv_offset, 0)
        yield Row(owner, q_stop - q_first, first - self.kv_offset, q_stop - first)
        if end > q_stop:
            yield Row(owner, end - q_stop, q_stop - self.kv_offset, 0)

    def _real_keys(self, end: int, own_positions: bool) -> list[tuple[int, int]]:
        """First real key and the one past the last, as positions, of each entry."""
        if self.padding is None:
            return [(self.kv_offset, end)] * self.batch_size
        if own_positions and self.padding.shape[1] < end:
            raise ValueError(complaint("attention_mask", f"{self.padding.shape[1]} tokens long", f"all {end} tokens, the cached ones included"))
        seen = self.padding[:, self.kv_offset : end].to(torch.int32).expand(self.batch_size, -1)
        if seen.shape[1] == 0:
            return [(self.kv_offset, self.kv_offset)] * self.batch_size
        first, last = seen.argmax(1), seen.shape[1] - 1 - seen.flip(1).argmax(1)
        spans = []
        for owner, (lo, hi, count) in enumerate(torch.stack((first, last, seen.sum(1)), 1).tolist()):
            if count and hi + 1 - lo != count:
                raise refuse(f"attention_mask of row {owner} has padding between its tokens", "pad on the left to generate")
            spans.append((self.kv_offset + lo, self.kv_offset + lo + count))
        return spans

    def _verify(self, pattern: Pattern, own_positions: bool, real: list[tuple[int, int]]) -> None:
        """Ask the mask functions about the edges of what each token should see, and about a few keys elsewhere."""
        b = torch.arange(self.batch_size, device=self.device)[:, None]
        q = torch.arange(self.q_length, device=self.device)[None, :] + self.q_offset
        first, stop = torch.tensor(real, device=self.device).T[..., None]
        lo, hi = first.expand(-1, self.q_length), stop.expand(-1, self.q_length)
        if pattern.causal:
            hi = torch.minimum(hi, q + 1)
        elif pattern.window is not None:
            hi = torch.minimum(hi, q + pattern.window)
        if pattern.window is not None:
            lo = torch.maximum(lo, q + 1 - pattern.window)
        if pattern.chunk is not None and pattern.chunk_origin is not None:
            origin = pattern.chunk_origin.to(self.device)[:, None]
            lo = torch.maximum(lo, origin + torch.div(q - origin, pattern.chunk, rounding_mode="floor") * pattern.chunk)
        scattered = (q * 40503 + b * 9973) % self.kv_length + self.kv_offset  # spread without touching the random state
        probes = torch.stack((lo - 1, lo, hi - 1, hi, scattered, self.kv_offset + self.kv_length - 1 - (scattered - self.kv_offset) // 2))
        k = probes.clamp(self.kv_offset, self.kv_offset + self.kv_length - 1)
        b, q = b.expand(k.shape), q.expand(k.shape)
        asked = self.mask_function(b, torch.zeros_like(b), q, k)
        if self.padding is not None:
            width = self.padding.shape[1]
            asked = asked & self.padding.expand(self.batch_size, -1)[b, k.clamp(max=width - 1)] & (k < width)
        tokens = (q >= first) & (q < stop) if own_positions else torch.ones_like(q, dtype=torch.bool)
        wrong = (asked != ((k >= lo) & (k < hi))) & tokens
        if bool(wrong.any()):
            _, entry, i = wrong.nonzero()[0].tolist()
            raise refuse(f"the mask of row {entry}, query token {i} is not what its parts ({pattern}) mean")

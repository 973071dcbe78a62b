"""What a layer needs: :class:`AttentionSpec`, and what an engine will ask at most: :class:`Limits`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from attnmux.dispatch.dtypes import COMPUTE_DTYPES as COMPUTE_DTYPES
from attnmux.dispatch.dtypes import DTYPE_NAMES as DTYPE_NAMES
from attnmux.dispatch.dtypes import DTYPES as DTYPES
from attnmux.dispatch.dtypes import FP8_DTYPES as FP8_DTYPES
from attnmux.dispatch.dtypes import parse_dtype as parse_dtype
from attnmux.dispatch.spec_checks import CHOICES as CHOICES
from attnmux.dispatch.spec_checks import check_combinations, check_ranges, check_types, require_int

RowClass = Literal["image", "prefill", "decode"]
ROW_CLASSES: tuple[RowClass, ...] = ("image", "prefill", "decode")
MAX_DECODE_TOKENS = 16
"""A decoder or cross row of 1 to this many query tokens is a decode row, whatever its context."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one group of attention layers needs. Frozen, hashable, normalised: equal needs compare equal.

    Args:
        num_q_heads, num_kv_heads: heads on this rank; the first must be a multiple of the second.
        head_size, v_head_size: elements of a key and of a value (``None``: the key's).
        dtype: of q, of the output and, unless ``kv_dtype`` says otherwise, of keys and values.
        scale: multiplies q.k (``None``: ``head_size ** -0.5``).
        q_dtype: an fp8 format if queries arrive quantised; otherwise ``dtype``.
        kv_dtype: an exact fp8 format of the cache; otherwise ``dtype``.
        kv_scale: granularity of ``k_scale`` and ``v_scale``: ``"tensor"`` (one) or ``"head"`` (one a KV head).
        page_size: keys a page holds; ``None`` for packed keys ``[kv_tokens, Hkv, D]`` without a pool.
        kv_layout: ``"NHD"`` for pools ``[pages, page, Hkv, D]``, ``"HND"`` for ``[pages, Hkv, page, D]``.
        attn_type: ``"decoder"``, ``"encoder_only"`` (the whole row both ways) or ``"cross"`` (an encoder's keys).
        causal: ``True``, ``False`` or ``"per_sequence"`` (``Batch.causal`` decides); ``None``: by ``attn_type``.
        sliding_window: keys a token sees, itself included: ``q_pos - k_pos < sliding_window``.
        window_right: keys to the right of the token where not causal (``None``: the window's own reach, W - 1).
        chunk: ``(size, lookback)``: a token sees ``q_pos // size - k_pos // size <= lookback``.
        softcap: ``c`` of ``c * tanh(score / c)``.
        alibi: ``"linear"`` (``-slope * |q - k|``) or ``"sqrt"`` (``-slope * sqrt(q - k)``).
        sinks: one logit a query head joins the softmax denominator (GPT-OSS).
        mm_prefix: tokens of one multimodal span see each other both ways; ``"override_window"`` lets spans
            reach beyond the window, ``"within_window"`` does not.
        rswa_window: reference sliding window: a global prefix (``Batch.prefix_lens``) and this many recent keys.
        sparse: reserved; anything but ``None`` is refused.
        return_lse: ``run`` also returns the log-sum-exp.
        batch_invariant: the bits of a row must depend on that row alone.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or the combination has no meaning.
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    v_head_size: int = None  # type: ignore[assignment]  # resolved in __post_init__, like every None below marked "resolved"
    scale: float = None  # type: ignore[assignment]  # resolved
    q_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved
    kv_dtype: torch.dtype = None  # type: ignore[assignment]  # resolved
    kv_scale: Literal["tensor", "head"] | None = None
    page_size: int | None = 16
    kv_layout: Literal["NHD", "HND"] = "NHD"
    attn_type: Literal["decoder", "encoder_only", "cross"] = "decoder"
    causal: bool | Literal["per_sequence"] = None  # type: ignore[assignment]  # resolved
    sliding_window: int | None = None
    window_right: int | None = None
    chunk: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: Literal["linear", "sqrt"] | None = None
    sinks: bool = False
    mm_prefix: Literal["override_window", "within_window"] | None = None
    rswa_window: int | None = None
    sparse: None = None
    return_lse: bool = False
    batch_invariant: bool = False
    _hash: int = dataclasses.field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        check_types(self)
        _resolve(self)
        check_ranges(self)
        check_combinations(self)
        key = tuple(getattr(self, f.name) for f in SPEC_FIELDS)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash  # a select() that is memoised hashes the spec every time

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.to_dict(),)  # a hash of strings differs between processes

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def row_classes(self) -> tuple[RowClass, ...]:
        """The row classes that batches of this spec can hold."""
        if self.attn_type == "encoder_only":
            return ("prefill",)
        return ROW_CLASSES if self.mm_prefix else ("prefill", "decode")

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some fields changed; fields that followed a changed one follow it again."""
        values = {f.name: getattr(self, f.name) for f in SPEC_FIELDS}
        for name, source in (("v_head_size", "head_size"), ("q_dtype", "dtype"), ("kv_dtype", "dtype")):
            if values[name] == values[source]:
                values[name] = None
        if self.scale == self.head_size**-0.5:
            values["scale"] = None
        if self.causal is (self.attn_type == "decoder"):
            values["causal"] = None
        return AttentionSpec(**{**values, **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; :func:`spec_from_dict` reads them back."""
        return {f.name: DTYPE_NAMES.get(v, v) if isinstance(v := getattr(self, f.name), torch.dtype) else v for f in SPEC_FIELDS}

    def describe(self) -> str:
        """The fields that are not at their default, in one line, as ``explain`` prints them."""
        parts = [f"heads={self.num_q_heads}/{self.num_kv_heads}", f"head_size={self.head_size}", f"dtype={DTYPE_NAMES[self.dtype]}"]
        derived = {"v_head_size": self.head_size, "q_dtype": self.dtype, "kv_dtype": self.dtype, "scale": self.head_size**-0.5}
        derived["causal"] = self.attn_type == "decoder"
        for f in SPEC_FIELDS[4:]:
            value = getattr(self, f.name)
            if value != derived.get(f.name, f.default) or f.name == "page_size":
                parts.append(f"{f.name}={show(value)}")
        return " ".join(parts)


SPEC_FIELDS = tuple(f for f in dataclasses.fields(AttentionSpec) if f.init)
SPEC_FIELD_NAMES = tuple(f.name for f in SPEC_FIELDS)


def show(value: object) -> str:
    """A field's value the way the command line takes it."""
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def spec_from_dict(values: dict[str, Any]) -> AttentionSpec:
    """The inverse of :meth:`AttentionSpec.to_dict`; dtypes may be names, tuples may be lists."""
    dtypes = {k: parse_dtype(values[k], k) for k in ("dtype", "q_dtype", "kv_dtype") if values.get(k) is not None}
    chunk = {"chunk": tuple(values["chunk"])} if values.get("chunk") is not None else {}
    return AttentionSpec(**{**values, **dtypes, **chunk})


_rebuild = spec_from_dict


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest batch an engine will plan; workspace is sized from it once.

    Args:
        max_num_seqs: rows in a batch.
        max_num_tokens: query tokens in a batch.
        max_seq_len: keys of a row.
        max_query_len: query tokens of a row.
    """

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    max_query_len: int

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            require_int(f.name, getattr(self, f.name), 1)


def _resolve(s: AttentionSpec) -> None:
    def default(name: str, value: object) -> None:
        if getattr(s, name) is None:
            object.__setattr__(s, name, value)

    default("v_head_size", s.head_size)
    default("scale", s.head_size**-0.5)
    default("q_dtype", s.dtype)
    default("kv_dtype", s.dtype)
    default("causal", s.attn_type == "decoder")
    for name in ("scale", "softcap"):
        if (value := getattr(s, name)) is not None:
            object.__setattr__(s, name, _as_float(value))
    if s.page_size is None:
        object.__setattr__(s, "kv_layout", "NHD")  # packed keys have one layout


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond any float: the range check refuses infinity by name
        return math.inf

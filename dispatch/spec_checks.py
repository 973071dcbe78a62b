"""What an :class:`~attnmux.dispatch.spec.AttentionSpec` may hold: types, ranges, and which combinations mean something."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnmux.dispatch.dtypes import COMPUTE_DTYPES, DTYPE_NAMES, FP8_DTYPES, parse_dtype
from attnmux.dispatch.errors import complaint

if TYPE_CHECKING:
    from attnmux.dispatch.spec import AttentionSpec

_INT32_MAX = 2**31 - 1


def require_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(complaint(name, f"{value!r} ({type(value).__name__})", "an int"))
    if value < least:
        raise ValueError(complaint(name, value, f"at least {least}"))
    if value > _INT32_MAX:
        raise ValueError(complaint(name, value, f"at most {_INT32_MAX}: lengths and sizes are 32-bit"))


def check_types(s: AttentionSpec) -> None:
    for name in ("dtype", "q_dtype", "kv_dtype"):
        value = getattr(s, name)
        if value is None and name != "dtype":
            continue
        if not isinstance(value, torch.dtype | str):
            raise TypeError(complaint(name, f"{value!r} ({type(value).__name__})", "a torch dtype"))
        object.__setattr__(s, name, parse_dtype(value, name))
    for name in ("sinks", "return_lse", "batch_invariant"):
        if not isinstance(getattr(s, name), bool):
            raise TypeError(complaint(name, repr(getattr(s, name)), "True or False"))
    for name in ("scale", "softcap"):
        value = getattr(s, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(complaint(name, f"{value!r} ({type(value).__name__})", "a float or None"))
    for name, least in (("num_q_heads", 1), ("num_kv_heads", 1), ("head_size", 1)):
        require_int(name, getattr(s, name), least)
    for name, least in (("v_head_size", 1), ("page_size", 1), ("sliding_window", 1), ("window_right", 0), ("rswa_window", 1)):
        if getattr(s, name) is not None:
            require_int(name, getattr(s, name), least)
    if s.chunk is not None:
        if not isinstance(s.chunk, tuple) or len(s.chunk) != 2:
            raise TypeError(complaint("chunk", repr(s.chunk), "(size, lookback) or None"))
        require_int("chunk size", s.chunk[0], 1)
        require_int("chunk lookback", s.chunk[1], 0)


CHOICES: dict[str, tuple[object, ...]] = {
    "kv_scale": (None, "tensor", "head"),
    "kv_layout": ("NHD", "HND"),
    "attn_type": ("decoder", "encoder_only", "cross"),
    "causal": (True, False, "per_sequence"),
    "alibi": (None, "linear", "sqrt"),
    "mm_prefix": (None, "override_window", "within_window"),
}


def check_ranges(s: AttentionSpec) -> None:
    for name, choices in CHOICES.items():
        value = getattr(s, name)
        if value not in choices or (name == "causal" and isinstance(value, int) and not isinstance(value, bool)):
            raise ValueError(complaint(name, repr(value), "one of " + ", ".join(map(repr, choices))))
    if s.dtype not in COMPUTE_DTYPES:
        raise ValueError(complaint("dtype", DTYPE_NAMES[s.dtype], "bf16, fp16 or fp32", "quantised caches are asked for with kv_dtype"))
    if s.num_q_heads % s.num_kv_heads:
        raise ValueError(complaint("num_q_heads", s.num_q_heads, f"a multiple of num_kv_heads={s.num_kv_heads}"))
    if s.q_dtype not in (s.dtype, *FP8_DTYPES):
        raise ValueError(complaint("q_dtype", DTYPE_NAMES[s.q_dtype], f"dtype ({DTYPE_NAMES[s.dtype]}) or an fp8 format"))
    if s.kv_dtype not in (s.dtype, *FP8_DTYPES):
        raise ValueError(complaint("kv_dtype", DTYPE_NAMES[s.kv_dtype], f"dtype ({DTYPE_NAMES[s.dtype]}) or an fp8 format"))
    if not math.isfinite(s.scale) or s.scale == 0:
        raise ValueError(complaint("scale", s.scale, "a finite number other than 0"))
    if s.softcap is not None and not (math.isfinite(s.softcap) and s.softcap > 0):
        raise ValueError(complaint("softcap", s.softcap, "a finite number above 0, or None for no cap"))
    if s.sparse is not None:
        raise ValueError(complaint("sparse", repr(s.sparse), "None", "sparse attention is reserved and not built yet"))


def check_combinations(s: AttentionSpec) -> None:
    def refuse(condition: bool, what: str, why: str) -> None:
        if condition:
            raise ValueError(f"{what} has no meaning: {why}")

    cross, encoder = s.attn_type == "cross", s.attn_type == "encoder_only"
    for name in ("sliding_window", "chunk", "alibi", "mm_prefix", "rswa_window"):
        refuse(cross and getattr(s, name) is not None, f"{name} with attn_type='cross'", "queries and keys share no positions")
    refuse(cross and s.causal is not False, "causal with attn_type='cross'", "queries and keys share no positions")
    refuse(encoder and s.causal is True, "causal=True with attn_type='encoder_only'", "an encoder sees its row both ways; use 'decoder'")
    refuse(encoder and s.mm_prefix is not None, "mm_prefix with attn_type='encoder_only'", "an encoder already sees its row both ways")
    refuse(s.window_right is not None and s.sliding_window is None, "window_right without sliding_window", "it is the window's right reach")
    refuse(s.window_right is not None and s.causal is True, "window_right with causal=True", "a causal token sees nothing to its right")
    refuse(s.kv_scale is not None and s.kv_dtype not in FP8_DTYPES, "kv_scale without an fp8 kv_dtype", "only quantised caches are scaled")
    for name in ("sliding_window", "chunk", "mm_prefix"):
        refuse(s.rswa_window is not None and getattr(s, name) is not None, f"rswa_window with {name}", "R-SWA is its own window")
    refuse(s.rswa_window is not None and s.causal is not True, f"rswa_window with causal={s.causal!r}", "R-SWA is causal")

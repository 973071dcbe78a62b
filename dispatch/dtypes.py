"""The element types attnmux knows, and their short names."""

from __future__ import annotations

import torch

from attnmux.dispatch.errors import complaint

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = tuple(dtype for dtype in DTYPE_NAMES if dtype not in COMPUTE_DTYPES)


def parse_dtype(value: torch.dtype | str, argument: str = "dtype") -> torch.dtype:
    """A torch dtype from itself, its short name (``bf16``) or its torch name (``bfloat16``)."""
    if isinstance(value, str):
        found = DTYPES.get(value.lower()) or getattr(torch, value, None)
        value = found if isinstance(found, torch.dtype) else value
    if not isinstance(value, torch.dtype) or value not in DTYPE_NAMES:
        raise ValueError(complaint(argument, repr(value), "one of " + ", ".join(DTYPES)))
    return value

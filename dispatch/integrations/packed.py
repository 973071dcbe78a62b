"""Keys and values of transformers' caches, ``[batch, Hkv, tokens, D]``, as packed keys ``[kv_tokens, Hkv, D]``, without moving them.

Entry ``b`` has its keys from packed index ``b * pitch``; what lies between entries belongs to other heads and is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.integrations.masks import Row

_INT32_MAX = 2**31 - 1


def packed_batch(rows: Sequence[Row], pitch: int, device: torch.device) -> Batch:
    """The batch of a mask's rows."""
    query_lens, key_lens = [row.q_len for row in rows], [row.num_keys for row in rows]
    starts = [row.owner * pitch + row.first_key for row in rows]
    starts.append(starts[-1] + key_lens[-1])

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    return Batch(
        query_start_loc=on_device([0, *torch.tensor(query_lens).cumsum(0).tolist()]),
        seq_lens=on_device(key_lens),
        kv_start_loc=on_device(starts),
        query_lens_cpu=query_lens,
        seq_lens_cpu=key_lens,
    )


def token_pitch(t: Tensor) -> int | None:
    """For ``[batch, Hkv, tokens, D]``: token strides between batch entries, or ``None`` if no packed view reaches them all."""
    batch, _, tokens, head_size = t.shape
    of_batch, _, of_token, of_element = t.stride()
    if of_element != 1 and head_size > 1:
        return None
    if batch == 1 or tokens == 1:
        return tokens if batch == 1 or of_batch > 0 else None
    if of_token <= 0 or of_batch % of_token or of_batch // of_token < tokens or batch * (of_batch // of_token) > _INT32_MAX:
        return None
    return of_batch // of_token


def packed_view(t: Tensor, pitch: int) -> Tensor:
    """``[batch, Hkv, tokens, D]`` as ``[kv_tokens, Hkv, D]``; entry ``b`` has its keys from index ``b * pitch``."""
    batch, kv_heads, tokens, head_size = t.shape
    of_batch, of_head, of_token, _ = t.stride()
    return t.as_strided(((batch - 1) * pitch + tokens, kv_heads, head_size), (of_token if tokens > 1 else of_batch, of_head, 1))

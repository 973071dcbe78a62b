"""What the layers of one forward share: the mask that was asked for, and plans made from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attnmux.dispatch.attention import Attention, Plan
from attnmux.dispatch.integrations.masks import Layout, MaskRequest, refuse
from attnmux.dispatch.integrations.packed import packed_batch


@dataclass(slots=True, eq=False)
class Mask:
    """What a mask tensor carries to the layers of one forward: the request, and plans shared by layers with equal specs."""

    request: MaskRequest
    _layout: Layout | None = None
    _plans: dict[tuple[Attention, int], Plan] | None = None

    @property
    def layout(self) -> Layout:
        """Read when a layer first needs it: a forward over ``attnmux_plan`` never does."""
        if self._layout is None:
            self._layout = self.request.layout()
        return self._layout

    def plan(self, attention: Attention, pitch: int) -> Plan:
        """The plan for keys of which batch entry ``b`` holds index ``b * pitch`` and following."""
        self._plans = self._plans or {}
        if (attention, pitch) not in self._plans:
            self._plans[attention, pitch] = attention.plan(packed_batch(self.layout.rows, pitch, attention.torch_device))
        return self._plans[attention, pitch]


def without_mask(given: Tensor | None, query: Tensor, key: Tensor, causal: bool, sliding_window: int | None) -> Mask:
    """The mask of a model that makes none: the whole row, or causal where there are as many queries as keys.

    Raises:
        ValueError: a mask was given after all, or what is meant is not certain.
    """
    batch, _, q_length, _ = query.shape
    kv_length = key.shape[2]
    if given is not None:
        raise refuse(f"a ready mask of shape {list(given.shape)}", "pass attention_mask as [batch, tokens] with 0 for padding")
    if sliding_window is not None and sliding_window < kv_length:
        raise refuse(f"sliding_window={sliding_window} without a mask")
    causal = causal and q_length > 1
    if causal and q_length != kv_length:
        raise refuse(f"causal attention of {q_length} queries over {kv_length} keys without a mask")
    return _plain_mask(batch, q_length, kv_length, causal, query.device)


@lru_cache(maxsize=16)
def _plain_mask(batch: int, q_length: int, kv_length: int, causal: bool, device: torch.device) -> Mask:
    """One for each shape, so that the layers of a forward share their plan."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    function = causal_mask_function if causal else bidirectional_mask_function
    return Mask(MaskRequest(batch, q_length, kv_length, 0, 0, function, None, None, device))

"""``attn_implementation="attnmux"`` for transformers models: masks become rows, keys and values are read where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from attnmux.dispatch import host
from attnmux.dispatch.attention import Attention
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.integrations.forward import Mask, without_mask
from attnmux.dispatch.integrations.masks import MaskFunction, MaskRequest, refuse
from attnmux.dispatch.integrations.packed import packed_view, token_pitch
from attnmux.dispatch.integrations.paged import PagedStep
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import AttentionSpec

NAME = "attnmux"
OLDEST = "5.24"
_MASK_ATTRIBUTE = "_attnmux_mask"
_UNSUPPORTED = {
    "position_bias": "a position bias is added to the scores",
    "head_mask": "heads are masked",
    "sinks": "sinks that differ from token to token",
    "block_table": "a cache paged by transformers",
    "cu_seq_lens_q": "several sequences are packed into one row (cu_seq_lens_q)",
    "cu_seq_lens_k": "several sequences are packed into one row (cu_seq_lens_k)",
}


@dataclass(slots=True)
class Copies:
    """Tensors that had to be copied because their strides fit no packed view."""

    queries: int = 0
    keys: int = 0


class TransformersAttention:
    """The two functions that transformers calls, and what they keep between calls.

    Attributes:
        copies: how often a layer's tensors had to be copied.
    """

    def __init__(self) -> None:
        self.copies = Copies()
        self._attentions: dict[tuple[AttentionSpec, torch.device], tuple[Selection, Attention]] = {}

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        *,
        mask_function: MaskFunction,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        device: torch.device | str = "cpu",
        **unused: Any,
    ) -> Tensor:
        """The mask interface: an empty ``[batch, 1, q_length, 0]`` tensor that carries a :class:`Mask`.

        It has four dimensions because transformers takes that for a finished mask, and no elements, so that ``contiguous`` returns
        the tensor itself and whoever computes with it fails. ``q_offset`` may be a tensor that a static cache advances before
        attention runs, so it is read here.
        """
        where = torch.device(device)
        padding = None if attention_mask is None else attention_mask.bool()
        request = MaskRequest(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), mask_function, padding, local_size, where)
        carrier = torch.empty((batch_size, 1, q_length, 0), dtype=torch.bool, device=where)
        setattr(carrier, _MASK_ATTRIBUTE, Mask(request))
        return carrier

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        attnmux_plan: PagedStep | None = None,
        output_attentions: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """The attention interface.

        Args:
            module: the attention module, asked for ``is_causal`` and ``layer_idx``.
            query: ``[batch, Hq, q_length, D]``.
            key, value: ``[batch, Hkv, kv_length, D]`` and ``[batch, Hkv, kv_length, Dv]``.
            attention_mask: from :meth:`mask`, or ``None`` where the model makes none.
            dropout: 0; there is no training here.
            scaling, softcap, s_aux: the spec's scale, softcap and sinks.
            sliding_window, is_causal: consulted only where there is no mask; the mask says more.
            attnmux_plan: a step over attnmux's own cache.

        Returns:
            ``([batch, q_length, Hq, Dv], None)``.

        Raises:
            ValueError: something is asked that no spec expresses.
        """
        _check_asked(dropout, output_attentions, unused)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask: Mask | None = getattr(attention_mask, _MASK_ATTRIBUTE, None)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        if attnmux_plan is not None:
            local = sliding_window if mask is None else mask.request.local_size
            asked = {"scale": scale, "softcap": softcap or None, "causal": causal, "window or chunk": local}
            return attnmux_plan.run(module, query, key, value, s_aux, asked), None
        if mask is None:
            mask = without_mask(attention_mask, query, key, causal, sliding_window)
        batch, heads, q_length, head_size = query.shape
        wanted, given = mask.request.shape, (batch, q_length, key.shape[0], key.shape[2])
        if given != wanted:
            raise refuse(f"a mask for (batch, queries, batch, keys) {wanted} beside tensors of {given}")
        spec = _spec(heads, key.shape[1], head_size, value.shape[3], query.dtype, scale, softcap or None, s_aux is not None, mask.layout.fields)
        attention = self._attention(spec, query.device)
        k, v, pitch = self._packed(key, value)
        q = query.transpose(1, 2).reshape(batch * q_length, heads, head_size)
        q = q if q.stride(-1) == 1 else q.contiguous()
        self.copies.queries += q.data_ptr() != query.data_ptr()
        out = attention.run(q, k, v, mask.plan(attention, pitch), sinks=s_aux)
        return (out if isinstance(out, Tensor) else out[0]).view(batch, q_length, heads, -1), None

    def _attention(self, spec: AttentionSpec, device: torch.device) -> Attention:
        """The front door for a spec; made anew when configuration or plugins change what is selected."""
        selection = host.select(spec, device)
        known = self._attentions.get((spec, device))
        if known is None or known[0] is not selection:
            known = self._attentions[spec, device] = (selection, Attention(spec, device))
        return known[1]

    def _packed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values as packed ``[kv_tokens, Hkv, D]`` views, and how many indices lie between batch entries."""
        pitch, tokens = token_pitch(key), key.shape[2]
        if pitch is None or pitch != token_pitch(value):  # then both token-major, which one of them may be already
            pitch = tokens
            key, value = (self._token_major(t) for t in (key, value))
        return packed_view(key, pitch), packed_view(value, pitch), pitch

    def _token_major(self, t: Tensor) -> Tensor:
        if token_pitch(t) == t.shape[2]:
            return t
        self.copies.keys += 1
        return t.transpose(1, 2).contiguous().transpose(1, 2)


def _check_asked(dropout: float, output_attentions: bool, unused: dict[str, Any]) -> None:
    if dropout:
        raise refuse(f"dropout={dropout}", "call model.eval(): attnmux is for inference")
    if output_attentions:
        raise refuse("output_attentions=True: the weights are never formed", "load the model with attn_implementation='eager'")
    for name, what in _UNSUPPORTED.items():
        if unused.get(name) is not None:
            raise refuse(what)


@lru_cache(maxsize=1024)
def _spec(
    heads: int,
    kv_heads: int,
    head_size: int,
    v_head_size: int,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    sinks: bool,
    fields: tuple[tuple[str, Any], ...],
) -> AttentionSpec:
    return AttentionSpec(
        heads, kv_heads, head_size, dtype, v_head_size=v_head_size, scale=scale, softcap=softcap, sinks=sinks, page_size=None, **dict(fields)
    )


@lru_cache(maxsize=1)
def register_transformers() -> TransformersAttention:
    """Make ``attn_implementation="attnmux"`` known to transformers. Calling it again changes nothing.

    Returns:
        The registered object; its ``copies`` count tensors that could not be read in place.

    Raises:
        ImportError: transformers is missing or too old; the message says what to type.
    """
    try:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError(f"transformers cannot be imported ({error}): pip install 'attnmux[transformers]'") from error
    if Version(transformers.__version__) < Version(OLDEST):
        found = complaint("transformers", transformers.__version__, f"at least {OLDEST}", "pip install 'attnmux[transformers]'")
        raise ImportError(found)
    registered = TransformersAttention()
    uncompiled: Any = torch.compiler.disable  # masks and plans are host objects; the model around them still compiles
    AttentionInterface.register(NAME, uncompiled(registered.attention))
    AttentionMaskInterface.register(NAME, uncompiled(registered.mask))
    return registered

"""Serving a transformers model from attnmux's own paged cache: what an engine hands to the model's forward as ``attnmux_plan``.

    model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, attnmux_plan=step)

``ids`` and ``positions`` are ``[1, tokens]``: the step's rows one after another, positions restarting with each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnmux.dispatch.attention import Attention, Plan
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's part of a step.

    Args:
        attention: shared by the layers of one spec.
        plan: of this step, made by ``attention``.
        k_cache, v_cache: the layer's pools, as for :meth:`attnmux.Attention.run`.
    """

    attention: Attention
    plan: Plan
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step over a paged cache. Each layer writes its new keys and values to its pools, then runs the plan.

    Args:
        layers: by ``module.layer_idx``.
        slot_mapping: int64 ``[tokens]``, where each token's key and value go, the same in every layer's pool.
    """

    layers: Sequence[PagedLayer]
    slot_mapping: Tensor

    def run(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, asked: dict[str, Any]) -> Tensor:
        """Attention of one layer.

        Args:
            module: the layer's attention module; its ``layer_idx`` says which layer.
            query: ``[1, Hq, tokens, D]``.
            key, value: ``[1, Hkv, tokens, D]`` and ``[1, Hkv, tokens, Dv]``, the new ones only.
            sinks: float ``[Hq]`` or ``None``.
            asked: ``scale``, ``softcap``, ``causal`` and ``window or chunk`` as the model wants them.

        Returns:
            ``[1, tokens, Hq, Dv]``.

        Raises:
            ValueError: the step's spec is not what the model asks for, or the tensors are no packed step.
        """
        index = getattr(module, "layer_idx", None)
        if index is None or not 0 <= index < len(self.layers):
            raise ValueError(complaint(f"layer_idx of {type(module).__name__}", index, f"0 to {len(self.layers) - 1}, one of attnmux_plan's layers"))
        layer = self.layers[index]
        _check_spec(layer.attention.spec, asked, index)
        if query.shape[0] != 1:
            raise ValueError(complaint("input_ids with attnmux_plan", f"a batch of {query.shape[0]}", "[1, tokens], the rows one after another"))
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                complaint(
                    "keys with attnmux_plan", f"{key.shape[2]} long", f"the step's {query.shape[2]} tokens", "pass use_cache=False to the model"
                )
            )
        k, v, q = key[0].transpose(0, 1), value[0].transpose(0, 1), query[0].transpose(0, 1)
        layer.attention.write_kv(k, v, layer.k_cache, layer.v_cache, self.slot_mapping)
        out = layer.attention.run(q, layer.k_cache, layer.v_cache, layer.plan, sinks=sinks)
        return (out if isinstance(out, Tensor) else out[0]).unsqueeze(0)


def _check_spec(spec: AttentionSpec, asked: dict[str, Any], layer: int) -> None:
    local = spec.sliding_window if spec.chunk is None else spec.chunk[0]
    held = {"scale": spec.scale, "softcap": spec.softcap, "causal": spec.causal, "window or chunk": local}
    if held != asked:
        wrong = [name for name in asked if held[name] != asked[name]]
        raise ValueError(
            complaint(
                f"the spec of layer {layer} in attnmux_plan",
                ", ".join(f"{name}={held[name]!r}" for name in wrong),
                ", ".join(f"{name}={asked[name]!r}" for name in wrong),
                "the model asks for it",
            )
        )

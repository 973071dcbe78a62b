"""The base class of backends: one instance serves one spec on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.cache import write_kv
from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import AttentionSpec, Limits


class LayerArgs(NamedTuple):
    """Per-layer inputs of one ``run``, already checked. Scales are host floats or device tensors ``[]`` or ``[Hkv]``.

    Args:
        sinks: float ``[Hq]``, present exactly when the spec has sinks.
        alibi_slopes: float32 ``[Hq]``, present exactly when the spec has ALiBi.
        q_scale, k_scale, v_scale: a stored value times its scale is the true value.
        form: the same object for calls with one state that differ in tensors' addresses and contents only, for backends that remember what they
            launched; ``None``: not known. Who changes something else of a call drops it: ``layer._replace(sinks=None, form=None)``.
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    q_scale: Tensor | float | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    form: object | None = None


class Backend(ABC):
    """An adapter to one kernel library. Only what a claim promises is ever asked of it, with inputs already checked.

    Subclasses import their library at module level: the module itself is loaded only when the backend is used.

    Args:
        spec: what it serves.
        device: where.
        options: the backend's own config section.

    Attributes:
        option_names: what its config section may hold, anything else is an error before it is made; ``None``: it checks for itself.
        limits: the largest batch that will be planned, where the front door was given limits; set before the first plan.
    """

    option_names: ClassVar[tuple[str, ...] | None] = None
    limits: Limits | None = None

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        self.spec = spec
        self.device = device
        self.options = options

    def workspace_bytes(self, limits: Limits) -> int:
        """Bytes of device memory that :meth:`plan` and :meth:`run` need for any batch within the limits."""
        return 0

    def plan_workspace_bytes(self, batch: Batch) -> int:
        """Bytes this batch needs; the front door grows the workspace to it when it was given no limits."""
        return 0

    def warmup(self, limits: Limits) -> None:  # noqa: B027  # most backends compile nothing
        """Compile or build everything that batches within the limits can reach."""

    @abstractmethod
    def plan(self, batch: Batch, workspace: Tensor | None, previous: Any) -> Any:
        """Prepare a step for some rows; shared by all layers.

        Args:
            batch: the rows of this backend; all tokens ``[0, batch.num_tokens)``.
            workspace: uint8, at least as large as asked for, or ``None`` when nothing was. Scratch for one :meth:`run`
                at a time: live plans and the parts of one plan share it, so nothing is to be kept there between calls.
            previous: an earlier state to refresh in place (CUDA graphs), or ``None``.

        Returns:
            Whatever :meth:`run` needs.
        """

    @abstractmethod
    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, state: Any, out: Tensor, lse: Tensor | None, layer: LayerArgs) -> None:
        """Attention of one layer into ``out`` (and ``lse``).

        Args:
            q: ``[tokens, Hq, D]``; tokens beyond the plan's are padding.
            k_cache, v_cache: ``[pages, page, Hkv, D]``, ``[pages, Hkv, page, D]`` (HND) or packed ``[kv_tokens, Hkv, D]``.
            state: what :meth:`plan` returned.
            out: ``[tokens, Hq, Dv]``, written for the plan's tokens only.
            lse: float32 ``[tokens, Hq]`` or ``None``.
            layer: per-layer inputs.
        """

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layer: LayerArgs) -> None:
        """Store new keys and values; slot = page * page_size + offset, -1 is skipped. The default is plain torch."""
        write_kv(self.spec, k, v, k_cache, v_cache, slot_mapping, layer.k_scale, layer.v_scale)

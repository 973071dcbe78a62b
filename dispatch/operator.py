"""The registered operators behind ``Attention.run`` and ``Attention.write_kv``, with fake implementations for the compiler.

Plans and attentions travel as 0-d int64 host tensors: an integer would be a constant to the compiler, and every new plan
would recompile the model; an object is no legal operator argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.errors import complaint

_library: Any = torch.library.Library("attnmux", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "attention(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out, Tensor(d!)? lse, Tensor plan, str? only, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "float? q_scale_value, float? k_scale_value, float? v_scale_value) -> ()"
)
_library.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor attention, "
    "Tensor? k_scale, Tensor? v_scale, float? k_scale_value, float? v_scale_value) -> ()"
)


PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that nobody has overloaded."""


class _Plan(Protocol):
    def execute(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, only: str | None, layer: LayerArgs) -> None: ...


class _Writer(Protocol):
    def store(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, layer: LayerArgs) -> None: ...


_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def new_handle(owner: object) -> Tensor:
    """A handle by which the operators find ``owner`` for as long as it lives."""
    number = next(_numbers)
    _objects[number] = owner
    return torch.tensor(number, dtype=torch.int64)


def _find(handle: Tensor, what: str) -> Any:
    owner = _objects.get(int(handle))
    if owner is None:
        raise ValueError(f"the {what} behind this call no longer exists: keep it alive while its kernels run")
    return owner


def split(name: str, scale: Tensor | float | None) -> tuple[Tensor | None, float | None]:
    """A scale as the operators take it: a tensor or a number.

    Raises:
        TypeError: it is neither.
    """
    if scale is None or isinstance(scale, Tensor):
        return scale, None
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(complaint(name, type(scale).__name__, "a float or a float32 tensor"))
    return None, float(scale)


def undisturbed() -> bool:
    """Whether nobody traces, transforms, profiles or intercepts calls now."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or _get_current_dispatch_mode() is not None:
        return False
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):  # make_fx(pre_dispatch=True)
        return False
    return not (torch._C._autograd._profiler_enabled() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def called_plainly(*values: object) -> bool:
    """Whether this call need not pass through the dispatcher, which takes longer than a launch. What is ``None`` or a number does not matter."""
    return undisturbed() and all(type(value) in PLAIN and not value.is_neg() if isinstance(value, Tensor) else True for value in values)


def expect_tensors(device: torch.device, required: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """What must be right before an operator is called: PyTorch refuses what is no tensor with a RuntimeError that
    starts with the schema, and sends a tensor of the meta device to the fake implementation, which does nothing.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    for name, value in (*required.items(), *((n, v) for n, v in optional.items() if v is not None)):
        if not isinstance(value, Tensor):
            raise TypeError(complaint(name, type(value).__name__, "a tensor"))
        if value.device != device:
            raise ValueError(complaint(f"{name}'s device", value.device, str(device)))


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    plan: Tensor,
    only: str | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_scale_value: float | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
) -> None:
    found: _Plan = _find(plan, "plan")
    scales = [
        number if tensor is None else tensor for tensor, number in ((q_scale, q_scale_value), (k_scale, k_scale_value), (v_scale, v_scale_value))
    ]
    found.execute(q, k_cache, v_cache, out, lse, only, LayerArgs(sinks, alibi_slopes, *scales))


def _write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    attention: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scale_value: float | None,
    v_scale_value: float | None,
) -> None:
    found: _Writer = _find(attention, "Attention")
    layer = LayerArgs(k_scale=k_scale_value if k_scale is None else k_scale, v_scale=v_scale_value if v_scale is None else v_scale)
    found.store(k, v, k_cache, v_cache, slot_mapping, layer)


def _nothing(*args: Any) -> None:
    """Both operators only write to tensors they are given."""


for _name, _function in (("attention", _attention), ("write_kv", _write_kv)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnmux::{_name}", _nothing, lib=_library)

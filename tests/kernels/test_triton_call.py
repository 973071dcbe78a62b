"""Launching again: a later launch takes the compiled kernel, with this call's addresses in their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

from attnmux.kernels.triton.call import addresses, alignment, bind  # noqa: E402


class Compiled:
    """Stands in for a compiled kernel: keeps what it is launched with, by the way that Triton's own calls take or past it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], Any]] = []
        self.ways: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.ways.append("Triton's")
        return lambda *args, stream: self.launches.append((grid, args, stream))

    def run(self, x: int, y: int, z: int, stream: int, function: str, metadata: str, *rest: Any) -> None:
        assert (function, metadata, rest[:3]) == ("function", "metadata", (None, None, None))
        self.ways.append("past it")
        self.launches.append(((x, y, z), rest[3:], stream))


class Kernel:
    """Stands in for a JIT function: binds by name, and gives back what it compiled."""

    arg_names = ("a_ptr", "b_ptr", "size", "c_ptr", "d_ptr", "BLOCK")

    def __init__(self, compiled: Compiled | None) -> None:
        self.compiled, self.bound = compiled, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> Compiled | None:
            self.bound.append((grid, named))
            return self.compiled

        return launch


def arguments(**tensors: torch.Tensor | None) -> dict[str, Any]:
    return {"a_ptr": None, "b_ptr": None, "c_ptr": None, "d_ptr": None, "size": 7, "BLOCK": 16, "num_warps": 4} | tensors


def test_later_launches_bind_nothing_and_take_their_own_addresses():
    kernel, (first, second, fixed) = Kernel(Compiled()), (torch.zeros(4) for _ in range(3))
    (bound,) = bind(kernel, (5, 1, 1), arguments(a_ptr=first, c_ptr=first, d_ptr=fixed), ("elsewhere_ptr", "c_ptr", "b_ptr", "a_ptr"))
    assert kernel.bound == [((5, 1, 1), arguments(a_ptr=first, c_ptr=first, d_ptr=fixed))]
    assert not kernel.compiled.launches
    for tensor in (second, first):
        bound(addresses((fixed, tensor, fixed, second)), 3)  # b_ptr was None and stays so
        assert kernel.compiled.launches[-1] == ((5, 1, 1), (second.data_ptr(), None, 7, tensor.data_ptr(), fixed.data_ptr(), 16), 3)
    bound([None, 1, None, 2], None, (9, 2, 1))
    assert kernel.compiled.launches[-1] == ((9, 2, 1), (2, None, 7, 1, fixed.data_ptr(), 16), None)
    assert len(kernel.bound) == 1
    assert kernel.compiled.ways == ["past it", "past it", "Triton's"]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_who_watches_launches_sees_them(name, monkeypatch):
    kernel = Kernel(Compiled())
    (bound,) = bind(kernel, (5, 1, 1), arguments(), ())
    hook = getattr(triton.knobs.runtime, name)
    if hook is None:
        monkeypatch.setattr(triton.knobs.runtime, name, lambda metadata: None)
    else:
        monkeypatch.setattr(hook, "calls", [lambda metadata: None])
    bound([], 3)
    assert kernel.compiled.ways == ["Triton's"] and len(kernel.compiled.launches) == 1


def test_the_interpreter_is_always_called_by_name():
    interpreted = Kernel(None)
    for grid in ((5, 1, 1), (6, 1, 1)):
        assert bind(interpreted, grid, arguments(), ("a_ptr",)) == []
    assert [grid for grid, _ in interpreted.bound] == [(5, 1, 1), (6, 1, 1)]


def test_addresses():
    tensor = torch.zeros(8)
    assert addresses((tensor, None, tensor[2:])) == [tensor.data_ptr(), None, tensor.data_ptr() + 8]


def test_alignment_tells_apart_what_triton_compiles_apart():
    assert alignment(64, 128) == alignment(16, 4096)
    assert len({alignment(16, 32), alignment(16, 40), alignment(24, 32), alignment(24, 40)}) == 4
    assert alignment(8, 32) == alignment(4, 16)  # off 16 bytes is off 16 bytes

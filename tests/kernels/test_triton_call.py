"""Launching again: the second launch of a form takes the compiled kernel, with this call's pointers in their places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from attnmux.kernels.triton.call import Held, call, described_by


class Compiled:
    """Stands in for a compiled kernel: keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3  # Triton's own runner takes no less
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    """Stands in for a JIT function: binds by name, and gives back what it compiled."""

    arg_names = ("a_ptr", "b_ptr", "size", "c_ptr", "BLOCK")

    def __init__(self, compiled: Compiled | None) -> None:
        self.compiled, self.bound = compiled, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**named: Any) -> Compiled | None:
            self.bound.append(named)
            return self.compiled

        return launch


def fixed() -> dict[str, Any]:
    return {"size": 7, "BLOCK": 16, "num_warps": 4}


def test_the_second_launch_binds_nothing_and_takes_its_own_pointers():
    kernel, held = Kernel(Compiled()), Held()
    first, second = (torch.zeros(4) for _ in range(2))
    call(held, "key", kernel, (5,), {"c_ptr": first, "a_ptr": first, "b_ptr": None}, fixed)
    assert len(kernel.bound) == 1
    assert not kernel.compiled.launches
    for tensor in (second, first):
        call(held, "key", kernel, (5,), {"c_ptr": tensor, "a_ptr": second, "b_ptr": None}, lambda: pytest.fail("bound again"))
        assert kernel.compiled.launches[-1] == ((5, 1, 1), (second.data_ptr(), None, 7, tensor.data_ptr(), 16))
    assert len(kernel.bound) == 1


def test_another_key_is_bound_anew_and_the_interpreter_always():
    kernel, held = Kernel(Compiled()), Held()
    for key in (1, 2):
        call(held, key, kernel, (5, 2), {"a_ptr": None, "b_ptr": None, "c_ptr": None}, fixed)
    assert len(kernel.bound) == 2
    interpreted, held = Kernel(None), Held()
    for _ in range(2):
        call(held, 1, interpreted, (5,), {"a_ptr": None, "b_ptr": None, "c_ptr": None}, fixed)
    assert len(interpreted.bound) == 2


def test_keys_tell_apart_what_triton_compiles_apart():
    room = torch.zeros(64)
    assert described_by(room[:16]) == described_by(room[16:32])
    assert described_by(room[:16]) != described_by(room[1:17])  # no longer on 16 bytes
    assert described_by(room.view(8, 8)) != described_by(room.view(8, 8).t())

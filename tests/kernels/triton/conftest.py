"""Where the kernels run: interpreted on the CPU, or natively on the first GPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from attnmux.backends._triton_step import State
from attnmux.backends.triton_backend import TritonBackend
from attnmux.dispatch import host
from attnmux.dispatch.device import Device
from attnmux.testing import Case
from attnmux.testing.measure import Answer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="I/N", help="every N-th test only, from the I-th: to share native compilation among processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("shard", None):
        first, every = map(int, config.getoption("shard").split("/"))
        items[:] = items[first::every]


@pytest.fixture(scope="session")
def machine() -> Device:
    """The device, as the host sees it."""
    kind = "cpu" if INTERPRETED else "cuda"
    return next(device for device in host.host().devices if device.type == kind)


@pytest.fixture(scope="session")
def device(machine: Device) -> torch.device:
    return torch.device(machine.torch_device)


@pytest.fixture(scope="session")
def attend(machine: Device) -> Callable[..., Answer]:
    """``attend(case, programs=8)``: the backend's answer, written into NaN, on the CPU. With a backend or a state of one: theirs."""

    def run(case: Case, programs: int = 8, backend: TritonBackend | None = None, state: State | None = None) -> Answer:
        backend = backend or TritonBackend(case.spec, machine, {"programs": programs})
        state = state or backend.plan(case.batch, None, None)
        out, lse = case.outputs()
        backend.run(case.q, case.k_cache, case.v_cache, state, out, lse, case.layer_args)
        return Answer(out.cpu(), None if lse is None else lse.cpu())

    return run


@pytest.fixture(scope="session")
def cpu() -> Callable[[Case], Case]:
    """The same case on the CPU, where the oracle computes: not every operator takes every fp8 format on a GPU."""

    def moved(value: Any) -> Any:
        return value.cpu() if isinstance(value, torch.Tensor) else value

    def copy(case: Case) -> Case:
        batch = dataclasses.replace(case.batch, **{f.name: moved(getattr(case.batch, f.name)) for f in dataclasses.fields(case.batch) if f.init})
        layer = {name: moved(value) for name, value in case.layer.items()}
        return dataclasses.replace(case, batch=batch, layer=layer, q=moved(case.q), k_cache=moved(case.k_cache), v_cache=moved(case.v_cache))

    return copy


@pytest.fixture(scope="session")
def ints(device: torch.device) -> Callable[[Sequence[Any]], torch.Tensor]:
    return lambda values: torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield

"""What the Triton adapter launches, in which order, and with whose addresses. Doubles stand in for the compiled kernels, which need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import attnmux

pytest.importorskip("triton", reason="needs triton")

from attnmux.backends import triton_backend
from attnmux.dispatch import host
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.spec import AttentionSpec, Limits
from attnmux.kernels.triton import launch

SPEC = AttentionSpec(4, 2, 16, torch.float16, page_size=16)
LIMITS = Limits(max_num_seqs=2, max_num_tokens=8, max_seq_len=4096, max_query_len=4)


class Launch(NamedTuple):
    kernel: str
    by_name: bool
    """Through Triton, and not what was compiled before."""
    arguments: dict[str, Any]


class Kernel:
    """Stands in for a JIT function and for what it compiles: every launch is written down."""

    function = packed_metadata = None

    def __init__(self, name: str, jit: Any, launches: list[Launch]) -> None:
        self.name, self.arg_names, self.launches = name, jit.arg_names, launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Kernel]:
        def call(*args: Any, stream: Any = None, **named: Any) -> Kernel:
            held = dict(zip(self.arg_names, args, strict=True)) if args else named
            self.launches.append(Launch(self.name, bool(named), {"grid": grid} | held))
            return self

        return call

    def run(self, *args: Any) -> None:
        raise AssertionError("a CPU has no stream")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    for name in ("plan_step", "paged_attention", "combine", "write_cache"):
        monkeypatch.setattr(launch, name, Kernel(name, getattr(launch, name), found))
    monkeypatch.setattr(triton_backend, "multiprocessors", lambda device: 8)
    return found


@pytest.fixture
def backend(launches: list[Launch]) -> triton_backend.TritonBackend:
    machine = next(device for device in host.host().devices if device.type == "cpu")
    found = triton_backend.TritonBackend(SPEC, machine, {})
    found.limits = LIMITS
    return found


def batch(*lens: int) -> attnmux.Batch:
    ints = {"dtype": torch.int32}
    starts, table = torch.arange(len(lens) + 1, **ints), torch.arange(len(lens) * 8, **ints).view(len(lens), 8)
    return attnmux.Batch(starts, torch.tensor(lens, **ints), table, query_lens_cpu=[1] * len(lens), seq_lens_cpu=list(lens))


def tensors(at: int = 0) -> tuple[torch.Tensor, ...]:
    """q, keys, values and output that nobody else has, so many elements behind a boundary of 16 bytes."""
    room = [torch.empty(4096 + 8, dtype=torch.float16)[at:] for _ in range(4)]
    q, out = (each[: 2 * 4 * 16].view(2, 4, 16) for each in (room[0], room[3]))
    return q, *(each[: 4 * 16 * 2 * 16].view(4, 16, 2, 16) for each in room[1:3]), out


def test_a_call_of_a_known_form_takes_what_was_compiled_and_its_own_addresses(backend, launches):
    state, form = backend.plan(batch(100, 100), None, None), object()
    launches.clear()
    for i, at in enumerate((0, 0, 0, 1, 1, 0)):
        q, k, v, out = tensors(at)
        backend.run(q, k, v, state, out, None, LayerArgs(form=form))
        assert [each.kernel for each in launches[-2:]] == ["paged_attention", "combine"]
        assert [each.by_name for each in launches[-2:]] == [i in (0, 3)] * 2  # off 16 bytes is another kernel
        attention, combine = (each.arguments for each in launches[-2:])
        for name, tensor in {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out}.items():
            assert attention[name] is tensor if i in (0, 3) else attention[name] == tensor.data_ptr()
        assert combine["out_ptr"] is out if i in (0, 3) else combine["out_ptr"] == out.data_ptr()
    assert len(launches) == 12


def test_another_form_or_plan_is_looked_up_anew(backend, launches):
    q, k, v, out = tensors()
    state, form = backend.plan(batch(100, 100), None, None), object()
    for _ in range(2):
        backend.run(q, k, v, state, out, None, LayerArgs(form=form))
    lse = torch.empty(2, 4)
    backend.run(q, k, v, state, out, lse, LayerArgs(form=object()))
    assert launches[-2].by_name and launches[-2].arguments["lse_ptr"] is lse
    later = backend.plan(batch(90, 30), None, state)
    assert not later.known  # its rows have other buffers where there are no limits
    backend.run(q, k, v, later, out, None, LayerArgs(form=form))
    assert not launches[-2].by_name and launches[-2].arguments["lse_ptr"] is None
    other = backend.plan(batch(90, 30), None, None)
    backend.run(q, k, v, other, out, None, LayerArgs(form=form))
    assert launches[-2].by_name  # it has tables of its own


def test_inputs_that_were_changed_under_the_same_form_are_looked_up_anew(backend, launches):
    """Who calls the backend with parts of a call may leave its form in place."""
    state, (q, k, v, out), sinks = backend.plan(batch(100, 100), None, None), tensors(), torch.zeros(4)
    layer = LayerArgs(sinks=sinks, form=object())
    for _ in range(3):
        backend.run(q, k, v, state, out, None, layer)
    assert not launches[-2].by_name
    backend.run(q, k, v, state, out, None, layer._replace(sinks=None))
    assert launches[-2].by_name and launches[-2].arguments["sinks_ptr"] is None
    backend.run(q, k, v, state, out, None, layer)
    assert not launches[-2].by_name and launches[-2].arguments["sinks_ptr"] == sinks.data_ptr()


@pytest.mark.parametrize("limits", [LIMITS, None], ids=["limits", "none"])
@pytest.mark.parametrize("columns", [8, 0], ids=["pages", "no pages"])
def test_something_is_launched_between_the_plan_and_what_reads_it_early(limits, columns, backend, launches, monkeypatch):
    """Attention reads a plan's tables while the launch before it may still run."""
    backend.limits = limits
    step = batch(*([5] * 2 if columns else [0] * 2))
    step.block_table = step.block_table[:, :columns]

    def noted(name: str, inner: Any) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if name == "zeros" or args[0].numel():
                launches.append(Launch(name, False, {}))
            return inner(*args, **named)

        return call

    monkeypatch.setattr(torch.Tensor, "copy_", noted("copy_", torch.Tensor.copy_))
    monkeypatch.setattr(torch, "zeros", noted("zeros", torch.zeros))
    state = backend.plan(step, None, None)
    order = [each.kernel for each in launches]
    assert order[-1] != "plan_step" and order.count("plan_step") == 1
    assert launches[order.index("plan_step")].arguments["table_ptr"] is step.block_table
    assert columns == 0 or state.rows.table is not step.block_table


def test_a_step_runs_what_it_has_rows_for_and_a_graph_what_its_rows_may_become(backend, launches, monkeypatch):
    """The fixture's eight multiprocessors are filled half again by rows of more than 192 query tokens, which then take larger tiles."""
    backend.limits = Limits(max_num_seqs=4, max_num_tokens=900, max_seq_len=4096, max_query_len=600)
    q, k, v, out = tensors()
    size = {"long": 64, "prefill": 16, "decode": 16}  # BLOCK_M

    def planned(previous: Any, *query_lens: int) -> Any:
        step = batch(*[700] * len(query_lens))
        step.query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
        step.query_lens_cpu = list(query_lens)
        launches.clear()
        return backend.plan(step, None, previous)

    def run(state: Any) -> list[int]:
        launches.clear()
        for _ in range(2):
            backend.run(q, k, v, state, out, None, LayerArgs())
        ran = [each for each in launches if each.kernel == "paged_attention"]
        assert len(ran) % 2 == 0
        of = {work.items.data_ptr(): work.config.block_m for work in state.work.values()}
        at = [each.arguments["items_ptr"] for each in ran[len(ran) // 2 :]]
        return [of[ptr.data_ptr() if isinstance(ptr, torch.Tensor) else ptr] for ptr in at]

    first = planned(None, 300, 1)
    assert list(first.now) == list(first.graph) == ["long", "decode"] and run(first) == [size["long"], size["decode"]]
    second = planned(first, 100, 0)
    assert [each.kernel for each in launches] == ["plan_step"] * 3  # what a graph holds is cut anew, all of it
    assert list(second.now) == ["prefill"] and run(second) == [size["prefill"]]
    assert set(second.graph) == {"prefill", "decode"}  # a tile for each class of rows that the plan has had
    back = planned(second, 300, 0)
    assert set(back.graph) == {"long", "decode"}
    second = planned(back, 100, 0)
    third = planned(second, 0, 1)
    assert list(third.now) == ["decode"] and run(third) == [size["decode"]]
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    assert len(run(third)) == 2 and third.graph.keys() in ({"long", "decode"}, {"prefill", "decode"})
    alone = planned(None, 1, 1)
    assert run(alone) == [size["decode"]]


def test_writes_of_a_known_form_have_a_grid_of_their_own(backend, launches):
    _, k_cache, v_cache, _ = tensors()
    for tokens in (3, 1, 0, 2):
        k, v, slots = torch.empty(tokens, 2, 16, dtype=torch.float16), torch.empty(tokens, 2, 16, dtype=torch.float16), torch.arange(tokens)
        before = len(launches)
        backend.write_kv(k, v, k_cache, v_cache, slots, LayerArgs())
        assert len(launches) - before == (tokens > 0)
        if tokens:
            assert launches[-1].arguments["grid"] == (tokens, 1, 1) and launches[-1].by_name == (tokens == 3)
            held = launches[-1].arguments["slots_ptr"]
            assert held is slots if tokens == 3 else held == slots.data_ptr()


def test_each_launch_of_a_mixed_step_is_known_by_itself(backend, launches):
    backend.limits = Limits(max_num_seqs=4, max_num_tokens=900, max_seq_len=4096, max_query_len=600)
    q, k, v, out = tensors()
    step = batch(700, 700)
    step.query_start_loc, step.query_lens_cpu = torch.tensor([0, 300, 301], dtype=torch.int32), [300, 1]
    state, form = backend.plan(step, None, None), object()
    for _ in range(3):
        launches.clear()
        backend.run(q, k, v, state, out, None, LayerArgs(form=form))
        at = [each.arguments["items_ptr"] for each in launches if each.kernel == "paged_attention"]
        assert [ptr.data_ptr() if isinstance(ptr, torch.Tensor) else ptr for ptr in at] == [work.items.data_ptr() for work in state.now.values()]

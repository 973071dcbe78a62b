"""FlexAttention's answers in both forms of the pools, and how far they are from the truth."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import attnmux
from attnmux.backends.flex_backend import FlexBackend
from attnmux.kernels.flex import run, step
from attnmux.testing import Case
from attnmux.testing.measure import distance, oracle


def planned(case: Case, in_place: bool) -> step.Step:
    backend = FlexBackend(case.spec, attnmux.select(case.spec, "cpu", require="flex").device, {})
    backend._gpu = in_place
    return backend.plan(case.batch, None, None)


def computed(case: Case, in_place: bool = False, compiler: object = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The answer, written into NaN."""
    out, lse = case.outputs()
    args = case.layer_args
    plan = planned(case, in_place)
    run.run_step(plan, case.q, case.k_cache, case.v_cache, out, lse, args.sinks, args.alibi_slopes, in_place=in_place, compiler=compiler)
    return out, lse


def error(case: Case, got: tuple[torch.Tensor, torch.Tensor | None]) -> float:
    """How far the answer is from the truth, as part of what is allowed."""
    want, n = oracle(case), case.batch.num_tokens
    off = distance(got[0][:n], want.out) / want.out_allowed
    assert torch.isnan(got[0][n:]).all()
    return off if got[1] is None else max(off, distance(got[1][:n], want.lse) / want.lse_allowed)


def clean(case: Case) -> Case:
    """Finite numbers where a backend must not look: torch's plain formulas multiply them by 0."""
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=300.0)
    return case


@pytest.fixture
def flex() -> Iterator[SimpleNamespace]:
    """The functions above, with torch on one thread: its calls are many and small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(planned=planned, computed=computed, error=error, clean=clean)
    torch.set_num_threads(before)

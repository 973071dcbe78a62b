"""The oracle as a backend: it takes everything, everywhere, and reads lengths when it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import attnmux
from attnmux.dispatch import host
from attnmux.dispatch.devices import known_names, resolve
from attnmux.dispatch.errors import ConfigError
from attnmux.dispatch.query import Query
from attnmux.dispatch.spec import AttentionSpec
from attnmux.testing import Row, make_case
from attnmux.testing.strategies import specs

SPEC = AttentionSpec(4, 2, 8, torch.float32, page_size=4, softcap=3.0, return_lse=True)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(specs())
def test_every_spec_on_every_device(spec):
    catalog = host.registry().catalog
    info = catalog.backends["reference"]
    for name in known_names(catalog):
        device = resolve(name, catalog, ())
        for row_class in spec.row_classes:
            for lengths in ("exact", "upper_bound"):
                assert info.judge(Query(spec, device, row_class, lengths), None)[1] == ()


def test_it_runs_what_the_fused_kernel_refuses():
    selection = attnmux.select(SPEC, "cpu")
    assert selection.name == "reference"
    assert [str(reason) for reason in selection.classes["decode"].rejected["sdpa"]] == ["softcap 3.0: not supported"]
    case = make_case(SPEC, (Row(1, 9), Row(5, 7)))
    attention = attnmux.Attention(SPEC, "cpu")
    out, lse = attention.run(case.q, case.k_cache, case.v_cache, attention.plan(case.batch))
    want = attnmux.reference_attention(case.q, case.k_cache, case.v_cache, SPEC, case.batch)
    assert torch.equal(out[:6], want[0][:6]) and torch.equal(lse[:6], want[1][:6])


def test_lengths_that_arrive_after_the_plan():
    """With upper bounds the device's lengths may still be written when the plan is made."""
    case = make_case(SPEC, (Row(2, 9), Row(1, 7)), lengths="upper_bound")
    attention = attnmux.Attention(SPEC, "cpu", require="reference")
    final = case.batch.seq_lens.clone()
    want = attention.run(case.q, case.k_cache, case.v_cache, attention.plan(case.batch))
    case.batch.seq_lens.copy_(final - 2)
    plan = attention.plan(case.batch)
    early = attention.run(case.q, case.k_cache, case.v_cache, plan)
    case.batch.seq_lens.copy_(final)
    late = attention.run(case.q, case.k_cache, case.v_cache, plan)
    assert torch.equal(late[0][:3], want[0][:3]) and not torch.allclose(early[0][:3], want[0][:3])


def test_precision_is_an_option():
    device = attnmux.select(SPEC, "cpu").device
    backend = host.registry().load_backend("reference")
    for value in ("float64", torch.float64):
        assert backend(SPEC, device, {"compute_dtype": value})._compute_dtype == torch.float64
    with pytest.raises(ConfigError, match="compute_dtype of backend 'reference' is 'float16', wanted float32 or float64"):
        backend(SPEC, device, {"compute_dtype": "float16"})

"""The conformance kit passes an honest backend and finds every kind of wrong one."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import attnmux.plugin as amx
from attnmux.dispatch.errors import ConfigError
from attnmux.testing import backend_checks, check_backend, parametrize_backend_checks
from attnmux.testing.check import CheckFailed, Result, Skip


def test_an_honest_backend_passes(declare):
    seen: list[Result] = []
    report = check_backend(declare(), quick=True, progress=seen.append)
    assert report.ok, report.failures
    assert list(report.results) == seen
    report.raise_if_failed()
    assert {r.check.concern for r in report.results} == {"declaration", "refusals", "numerics", "features", "visibility", "invariance", "errors"}
    assert report.count("passed") > 100
    assert {r.check.id for r in report.results if r.status == "skipped"} == {
        "declaration/import-is-light",
        "invariance/claim1-plain-far-pages",
    }
    found = json.loads(json.dumps(report.to_dict()))
    assert found.keys() == {"backend", "device", "ok", "stopped", "stale_expected_failures", "results"}
    assert found["results"][0].keys() == {"id", "concern", "status", "detail", "seconds"}


BF16 = {"dtype": amx.OneOf(torch.bfloat16)}

WRONG = [
    ("IgnoresWindow", {}, "features/claim1-sliding_window-fp32", "the answer is the one for sliding_window=None: sliding_window is ignored"),
    ("IgnoresWindow", BF16, "features/claim1-sliding_window", "sliding_window is ignored"),
    ("WindowOffByOne", {}, "features/claim1-sliding_window-fp32", "the answer is the one for sliding_window=6"),
    ("WindowOffByOne", {}, "numerics/claim1-sliding_window", "out is off by"),
    ("IgnoresSinks", {}, "features/claim1-sinks-fp32", "the answer is the one for sinks=False: sinks is ignored"),
    ("LogToBaseTwo", {}, "features/claim1-return_lse-fp32", "base 2"),
    ("LogToBaseTwo", {}, "numerics/claim1-return_lse", "lse is off by"),
    ("ReadsDirtyTail", {}, "numerics/claim1-plain", "NaN in all"),
    ("IgnoresPerHeadScale", {}, "numerics/claim1-kv_fp8_e4m3fn_by_head", "out is off by"),
    ("LinearForSqrt", {"alibi": amx.ANY}, "features/claim1-alibi_sqrt-fp32", "the answer is the one for alibi=linear: alibi_sqrt is ignored"),
    ("DependsOnBatch", {"batch_invariant": amx.YES_OR_NO}, "invariance/claim1-batch_invariant-alone", "has other bits alone"),
    ("LooksAtPageIds", {}, "invariance/claim1-plain-page-ids", "the same keys on other pages give other bits"),
    ("KeepsOldPlan", {}, "invariance/claim1-plain-refreshed-plan", "out is off by"),
    ("HoldsOnePlan", {}, "invariance/claim1-plain-live-plans", "out is off by"),
    ("WritesSkippedSlots", {}, "numerics/claim1-plain-write_kv", "bytes differ"),
]


@pytest.mark.parametrize(("name", "claim", "check", "said"), WRONG, ids=[f"{w[0]}-{w[2].rpartition('-')[2]}-{i}" for i, w in enumerate(WRONG)])
def test_a_wrong_backend_is_found(declare, wrong, name, claim, check, said):
    declare(getattr(wrong, name), **claim)
    found = {c.id: c for c in backend_checks("acme", quick=True)}
    with pytest.raises(CheckFailed, match=".*" + said):
        found[check].run()


def test_a_constraint_that_says_no_and_means_yes_is_found(declare, wrong):
    report = check_backend(declare(mm_prefix=wrong.Silent()), quick=True)
    found = {r.check.id: r.detail for r in report.failures}
    assert "the matrix says nothing is accepted, the check accepts override_window" in found["declaration/sentence-equals-check"]


def test_a_backend_that_never_refuses_is_found(declare, wrong):
    report = check_backend(declare(wrong.Honest, wrong.NeverRefusesInfo), quick=True)
    found = {r.check.id: r.detail for r in report.failures}
    assert {"refusals/alibi_sqrt", "refusals/mm_prefix_override", "refusals/rswa", "refusals/head_size", "refusals/page_size"} <= found.keys()
    assert "no claim covers it for prefill rows, yet select accepts it" in found["refusals/alibi_sqrt"]
    assert all(id.startswith("refusals/") for id in found)


def test_a_backend_that_claims_everything_is_held_to_it(declare, wrong):
    """It may claim, but then every claim is run: a wrapper without spans fails where spans matter."""

    class WithoutSpans(wrong.Honest):
        def spoil_spec(self, spec):
            return spec.replace(mm_prefix=None)

    report = check_backend(declare(WithoutSpans, mm_prefix=amx.ANY), quick=True)
    failed = {r.check.id for r in report.failures}
    assert {"features/claim1-mm_prefix_override-fp32", "numerics/claim1-mm_prefix_override"} <= failed
    assert not [id for id in failed if "mm_prefix" not in id]


def test_expected_failures(declare, wrong):
    expected = {"features/claim1-sinks-fp32": "known", "numerics/claim1-plain": "passes by now", "numerics/claim9-plain": "of another version"}
    report = check_backend(declare(wrong.IgnoresSinks), quick=True, expected_failures=expected)
    status = {r.check.id: r.status for r in report.results}
    assert status["features/claim1-sinks-fp32"] == "expected failure"
    assert status["numerics/claim1-plain"] == "unexpected pass"
    assert report.stale == ("numerics/claim9-plain",)
    with pytest.raises(CheckFailed, match="numerics/claim1-plain: expected to fail"):
        report.raise_if_failed()


def test_a_backend_that_raises_is_a_failure_not_a_crash(declare, wrong):
    class Crashes(wrong.Honest):
        def run(self, *args):
            raise MemoryError("out of shared memory")

    report = check_backend(declare(Crashes), quick=True)
    assert "MemoryError: out of shared memory" in {r.detail for r in report.failures}


def test_check_ids_are_unique_and_stable(declare):
    name = declare()
    ids = [check.id for check in backend_checks(name)]
    assert len(ids) == len(set(ids)) > 130
    assert ids == [check.id for check in backend_checks(name)]
    quick = {check.id for check in backend_checks(name, quick=True)}
    assert quick < set(ids)


def test_where_it_cannot_run_only_words_are_checked(declare):
    declare(device=amx.DeviceSet("cuda:sm90"))
    report = check_backend("acme", quick=True)
    assert {r.check.concern for r in report.results} == {"declaration", "refusals"}
    assert report.ok


def test_unknown_backend(declare):
    with pytest.raises(ConfigError, match="unknown backend 'acne': did you mean 'acme'"):
        list(backend_checks(declare() and "acne"))


def test_parametrize(declare):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mark = parametrize_backend_checks(declare(), quick=True, expected_failures={"numerics/claim1-plain": "known", "no/such": "gone"})
    assert ["no/such" in str(w.message) for w in caught] == [True]
    names, params = mark.args
    assert names == "check"
    by_id = {param.id: param for param in params}
    marked = by_id["acme/numerics/claim1-plain"].marks
    assert [m.name for m in marked] == ["xfail"]
    assert marked[0].kwargs == {"reason": "known", "strict": True}
    by_id["acme/numerics/claim1-sinks"].values[0].run()
    with pytest.raises(Skip):
        by_id["acme/declaration/import-is-light"].values[0].run()

"""``attnmux check``, ``warmup`` and ``bench`` on this machine's CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import attnmux.plugin as amx
from attnmux.dispatch import host
from attnmux.dispatch.cli.bench import rows_from
from attnmux.dispatch.registry import Registry

SPEC = ("--heads", "4/2", "--head-size", "32", "--dtype", "fp32", "--device", "cpu")


def test_every_backend_of_this_machine_equals_the_oracle(run):
    status, out, err = run("check", "--quick", "--device", "cpu", "--json")
    found = json.loads(out)["check"]
    failures = [(r["backend"], c["id"], c["detail"]) for r in found["reports"] for c in r["results"] if c["status"] == "failed"]
    assert failures == []
    assert (status, err, found["ok"]) == (0, "", True)
    assert {"sdpa", "reference"} <= {r["backend"] for r in found["reports"]}
    assert all(why for why in found["not_run"].values())
    concerns = {c["concern"] for c in found["reports"][0]["results"]}
    assert concerns == {"declaration", "refusals", "numerics", "features", "visibility", "invariance", "errors"}


def test_a_named_backend_that_cannot_run_is_no_success(run):
    status, out, _ = run("check", "--backend", "aiter", "--quick")
    assert status == 1
    assert "not run: aiter: " in out
    assert "declaration" in out


class Zeros(amx.Backend):
    """Answers 0 to everything."""

    def plan(self, batch, workspace, previous):
        return batch

    def run(self, q, k_cache, v_cache, state, out, lse, layer):
        out[: state.num_tokens] = 0


@pytest.fixture
def zeros() -> Iterator[None]:
    any_head = amx.Claim(device=amx.DeviceSet("cpu"), head_size=amx.OneOf(32), dtype=amx.ANY, page_size=amx.OneOf(16))

    def attnmux_backends():
        return [amx.BackendInfo(name="zeros", summary="wrong", claims=(any_head,), implementation=Zeros)]

    plugin = type("Plugin", (), {"attnmux_contract": "1.0", "attnmux_backends": staticmethod(amx.hookimpl(attnmux_backends))})
    registry = Registry(("attnmux.platforms.cpu", "attnmux.backends.reference", "attnmux.backends.sdpa"), entry_points=False)
    registry.register(plugin, "zeros")
    with host.using(registry):
        yield


@pytest.mark.usefixtures("zeros")
def test_a_wrong_backend_fails(run):
    status, out, _ = run("check", "--backend", "zeros", "--quick")
    assert status == 1
    assert "FAILED zeros numerics/claim1-plain: out is off by" in out
    counts = {line.split()[2]: line.split()[3:6] for line in out.splitlines() if line.startswith("zeros ")}
    assert counts["refusals"][1] == "0"
    assert int(counts["numerics"][1]) > 5


def test_warmup(run):
    status, out, _ = run("warmup", *SPEC, "--max-seq-len", "1024", "--require", "reference")
    assert status == 0
    assert out.startswith("reference on cpu: ")
    assert "workspace 0 bytes" in out
    assert "  reference: nothing to compile or build\n" in out


def test_warmup_json(run):
    _, out, _ = run("warmup", *SPEC, "--require", "reference", "--json")
    found = json.loads(out)["warmup"]
    assert found.keys() == {"device", "routes", "backends", "seconds", "workspace_bytes"}
    assert found["routes"] == {"prefill": "reference", "decode": "reference"}


def test_what_nothing_can_run_is_explained_with_status_1(run):
    status, out, err = run("warmup", *SPEC, "--require", "sdpa", "--softcap", "30")
    assert (status, out) == (1, "")
    assert err.startswith("attnmux: error: no backend can run prefill, decode rows")
    assert "sdpa: softcap 30.0: not supported" in err


@pytest.mark.usefixtures("zeros")
def test_bench(run):
    status, out, _ = run("bench", *SPEC, "--seqs", "2x1:40,20:20", "--backend", "zeros", "--backend", "reference", "--require", "sdpa", "--json")
    found = json.loads(out)["bench"]
    assert status == 0
    assert {t["backend"] for t in found["timings"]} == {"zeros", "reference", "sdpa"}
    assert all(t["microseconds"] >= 0 and t["gb_per_s"] >= 0 for t in found["timings"])  # how long it took is not tested
    assert found["selected"] == "sdpa"
    assert found["regret"] >= 0
    fastest = found["timings"][0]["microseconds"]
    picked = next(t["microseconds"] for t in found["timings"] if t["backend"] == "sdpa")
    assert found["regret"] == pytest.approx(picked / fastest - 1, rel=1e-2, abs=1e-2)  # the times are rounded


@pytest.mark.usefixtures("zeros")
def test_bench_says_what_was_not_timed_and_why(run):
    _, out, _ = run("bench", *SPEC, "--seqs", "1:40", "--softcap", "20", "--require", "reference")
    assert "select() picks reference, regret 0.0%" in out
    assert "not timed: zeros: softcap 20.0: not supported" in out
    assert "not timed: sdpa: softcap 20.0: not supported" in out


def test_rows_of_bench():
    rows = rows_from("2x1:40, 20:30@3-9@12-20", prefix_len=5)
    assert [(r.q_len, r.kv_len, r.spans, r.prefix_len, r.causal) for r in rows] == [
        (1, 40, (), 5, True),
        (1, 40, (), 5, False),
        (20, 30, ((3, 9), (12, 20)), 5, True),
    ]

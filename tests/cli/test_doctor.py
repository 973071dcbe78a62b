"""``attnmux doctor`` works where little else does."""

from __future__ import annotations

import builtins
import json
from types import SimpleNamespace

import pytest

import attnmux.plugin as amx
from attnmux.dispatch import config
from attnmux.dispatch.cli import doctor


def findings(run):
    status, out, err = run("doctor", "--json")
    assert err == ""
    report = json.loads(out)["doctor"]
    assert (status == 0) == report["ok"] == all(f["status"] != "fail" for f in report["findings"])
    return report["findings"]


@pytest.mark.usefixtures("lab")
def test_a_healthy_machine(run):
    found = findings(run)
    assert {f["check"] for f in found} == {"versions", "devices", "plugins", "backends", "configuration"}
    assert [f for f in found if f["status"] == "fail"] == []
    needs = next(f for f in found if f["text"].startswith("beta:"))
    assert (needs["status"], needs["hint"]) == ("ok", "pip install 'beta-kernels>=2'")  # no device of this machine is beta's


@pytest.mark.usefixtures("lab")
def test_text_has_a_mark_and_a_hint_a_line(run):
    status, out, _ = run("doctor")
    assert status == 0
    assert "backends\n  warn  alpha: declared, its code is not in this version yet\n" in out
    assert "        pip install 'beta-kernels>=2'\n" in out


def test_a_plugin_that_fails_is_a_finding(run, lab):
    lab._load("attnmux.platforms.no_such_module", "builtin", "", lambda: __import__("attnmux.platforms.no_such_module"))
    failed = [f for f in findings(run) if f["status"] == "fail"]
    assert len(failed) == 1
    assert "no_such_module" in failed[0]["text"]
    assert "ATTNMUX_DISABLE_PLUGINS=attnmux.platforms.no_such_module" in failed[0]["hint"]


def test_a_check_of_a_plugin_that_raises_is_a_finding(run, lab):
    def broken():
        raise OSError("no license server")

    def attnmux_health_checks():
        return [amx.HealthCheck("license", broken)]

    plugin = SimpleNamespace(attnmux_contract="1.0", attnmux_health_checks=amx.hookimpl(attnmux_health_checks))
    lab.register(plugin, "acme")
    assert findings(run)[-1] == {"check": "license", "status": "fail", "text": "the check itself failed: OSError: no license server", "hint": ""}


@pytest.mark.parametrize("broken", ["variable", "file"])
def test_broken_settings_are_one_finding_and_the_rest_is_examined(run, monkeypatch, tmp_path, broken):
    if broken == "variable":
        monkeypatch.setenv("ATTNMUX_PREFR", "triton")
    else:
        (tmp_path / "a.toml").write_text("prefr = 'triton'")
        monkeypatch.setenv("ATTNMUX_CONFIG", str(tmp_path / "a.toml"))
    config.reload_config()
    try:
        found = findings(run)
        assert [f["text"] for f in found if f["check"] == "configuration"] == [f["text"] for f in found if "prefr" in f["text"].lower()]
        assert {f["check"] for f in found} == {"versions", "devices", "plugins", "backends", "configuration"}
        with pytest.raises(config.ConfigError):  # the broken setting is still what the process has
            config.base()
    finally:
        monkeypatch.undo()
        config.reload_config()


def test_without_torch_it_still_reports(monkeypatch):
    real = builtins.__import__

    def no_host(name, *args, **kwargs):
        if name == "attnmux.dispatch.doctor":
            raise ImportError("libtorch_cpu.so: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_host)
    report = doctor.examine_all()
    assert report[0][1].status == "fail"
    assert "libtorch_cpu.so" in report[0][1].text
    assert any(finding.text.startswith("torch 2") for _, finding in report)

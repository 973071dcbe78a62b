"""``attnmux devices``, ``backends`` and ``reason``."""

from __future__ import annotations

import json

import pytest

from attnmux.dispatch.matrix import COLUMNS
from attnmux.dispatch.reasons import CODES


def test_devices_lists_this_machine(run):
    status, out, _ = run("devices", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["version"] == 1
    assert found["devices"][-1]["name"] == "cpu"
    assert found["devices"][-1]["real"] is True
    assert found["devices"][-1].keys() >= {"type", "arch", "title", "platform", "index", "shared_memory", "features", "notes"}


@pytest.mark.usefixtures("lab")
def test_known_devices_are_those_of_the_tables(run):
    _, out, _ = run("devices", "--known", "--json")
    assert [(d["name"], d["real"]) for d in json.loads(out)["devices"]] == [("cuda:sm90", False), ("cpu", False)]


@pytest.mark.usefixtures("lab")
def test_devices_table(run):
    _, out, _ = run("devices", "--known")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["name", "title", "platform", "index", "shared", "memory", "features", "notes"]
    assert lines[2] == ["cuda:sm90", "Lab", "card", "lab", "64", "KiB", "bf16"]


@pytest.mark.usefixtures("lab")
def test_backends_table_and_filter(run):
    _, out, _ = run("backends")
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("alpha", "beta"))] == ["alpha", "beta"]
    assert "page: 16-64 %16" in out
    assert "features: sliding_window" in out
    _, out, _ = run("backends", "--device", "cpu")
    assert "alpha" not in out


@pytest.mark.usefixtures("lab")
def test_backends_markdown(run):
    _, out, _ = run("backends", "--markdown")
    header, rule, alpha, beta = out.splitlines()
    assert header == "| " + " | ".join(COLUMNS) + " |"
    assert rule.count("---") == len(COLUMNS) == alpha.count("|") - 1
    assert alpha.startswith("| alpha | cuda:sm90 | image prefill decode | 64 128 | bf16 | = dtype | 16-64 %16 |")
    assert beta.endswith("| declared, not run |")


@pytest.mark.usefixtures("lab")
def test_backends_json(run):
    _, out, _ = run("backends", "--json")
    alpha, beta = json.loads(out)["backends"]
    assert (alpha["name"], alpha["plugin"], alpha["summary"]) == ("alpha", "lab", "takes windows")
    assert beta["claims"][0]["head_size"] == "8+ %8"


def test_reason(run):
    assert run("reason", "denied") == (0, CODES["denied"] + "\n", "")
    assert json.loads(run("reason", "--json")[1])["codes"] == CODES
    _, out, _ = run("reason")
    assert all(code in out for code in CODES)


@pytest.mark.usefixtures("lab")
def test_a_pipe_gets_whole_lines_and_a_narrow_screen_folds(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    wide = max(map(len, run("backends")[1].splitlines()))
    monkeypatch.setenv("COLUMNS", "60")
    narrow = max(map(len, run("backends")[1].splitlines()))
    assert narrow <= 60 < wide


@pytest.mark.usefixtures("lab")
def test_no_colour_where_it_is_not_wanted(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("doctor")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in run("doctor")[1]

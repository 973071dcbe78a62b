"""Plugins: installed ones good and broken, run-time ones, and backends that fail to load. A broken one never takes the host down."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import TinyBackend, claim, info, lab, platform, plugin, registry

import attnmux
from attnmux.dispatch import hookspecs, host
from attnmux.dispatch.claims import BackendInfo, Composition
from attnmux.dispatch.constraints import OneOf
from attnmux.dispatch.doctor import examine
from attnmux.dispatch.errors import AttnmuxError, PluginError
from attnmux.dispatch.health import Finding, HealthCheck
from attnmux.dispatch.hookspecs import CONTRACT, hookimpl
from attnmux.dispatch.platform import Insertion
from attnmux.dispatch.registry import BUILTINS, Registry
from attnmux.dispatch.spec import AttentionSpec

Install = Callable[[Registry], Registry]
BROKEN = {
    "fake_import_error": "ImportError: this plugin never imports",
    "fake_exits": "SystemExit: this plugin leaves at import",
    "fake_no_module": "ModuleNotFoundError: No module named 'fake_attn.no_such_module'",
    "fake_newer": "PluginError: speaks contract 1.99, this attnmux speaks 1.0: install versions that agree",
    "fake_other_major": "PluginError: speaks contract 2.0, this attnmux speaks 1.0: install versions that agree",
    "fake_no_contract": "PluginError: declares no contract version: wanted attnmux_contract = '1.0'",
    "fake_odd_contract": "PluginError: attnmux_contract is 'one', wanted two numbers such as '1.0'",
    "fake_duplicate": "the name 'fake_good' is taken: declared by fake_good and by fake_duplicate",
    "fake_misspelt": "attnmux_backend",
    "fake_midway": "PluginError: attnmux_compositions failed: RuntimeError: half of it was declared",
    "fake_wrong_type": "PluginError: attnmux_backends returned str, wanted BackendInfo",
    "fake_bare_value": "PluginError: attnmux_backends failed: TypeError: head_size of a claim is 128, wanted a constraint, such as OneOf(128)",
    "fake_returns_nothing": "PluginError: attnmux_orders failed: TypeError: 'NoneType' object is not iterable",
}


def load(**settings: Any) -> Registry:
    return Registry(builtins=(), **settings)


@pytest.fixture
def with_fakes(site: Callable[..., None]) -> Registry:
    site("site")
    # "fake_duplicate" and others sort after "fake_good", so the good one is loaded when they come
    return load()


def test_without_entry_points_nothing_is_loaded(site: Callable[..., None]) -> None:
    site("site")
    assert load(entry_points=False).records == {}
    assert "fake_attn" not in sys.modules


def test_each_broken_plugin_is_set_aside_with_its_error(site: Callable[..., None]) -> None:
    site("site")
    records = load().records
    failed = {name: record.error for name, record in records.items() if record.state == "failed"}
    assert set(failed) - {"fake_good", "fake_duplicate"} == set(BROKEN) - {"fake_duplicate"}
    for name in set(BROKEN) - {"fake_duplicate"}:
        assert BROKEN[name] in failed[name]
        assert (records[name].origin, records[name].distribution) == ("entry point", "fake-attn 1.0")


def test_whoever_declares_a_name_second_is_set_aside_and_both_are_named(with_fakes: Registry) -> None:
    """Plugins load by name: ``fake_duplicate`` comes before ``fake_good``."""
    assert with_fakes.records["fake_duplicate"].state == "active"
    assert with_fakes.records["fake_good"].error == "PluginError: the name 'fake_good' is taken: declared by fake_duplicate and by fake_good"


@pytest.fixture
def good(site: Callable[..., None]) -> Registry:
    site("site")
    return load(disabled=["fake_duplicate"])


def test_the_good_one_works_beside_them(good: Registry) -> None:
    active = [record.name for record in good.records.values() if record.state == "active"]
    assert active == ["fake_good", "fake_older"]
    assert list(good.catalog.backends) == ["fake_good", "fake_unloadable"]
    assert list(good.catalog.compositions) == ["fake_mix"]
    assert [(i.name, i.source) for i in good.catalog.insertions] == [("fake_good", "plugin fake_good")]
    assert [check.name for check in good.catalog.health_checks] == ["fake license"]
    assert good.catalog.providers == dict.fromkeys(("fake_good", "fake_unloadable", "fake_mix"), "fake_good")
    assert good.catalog.names() == ["fake_good", "fake_mix", "fake_unloadable"]


def test_nothing_of_a_broken_one_is_kept(good: Registry) -> None:
    assert "fake_half" not in good.catalog.compositions
    assert "fake_bare" not in good.catalog.backends
    good.register(plugin(compositions=[Composition("fake_half", (("decode", "fake_good"),))]), "again")
    assert "fake_half" in good.catalog.compositions


def test_installed_plugins_run_beside_the_built_in_ones(site: Callable[..., None], spec: AttentionSpec, install: Install) -> None:
    site("site")
    made = install(Registry(disabled=["fake_duplicate"]))
    assert {"triton", "fake_good"} <= set(made.catalog.backends)
    selection = attnmux.select(spec, "cpu")
    assert selection.routes["decode"] == "fake_good"
    assert selection.classes["decode"].candidates[0].name == "fake_good"
    assert selection.routes["prefill"] != "fake_good"


@pytest.mark.parametrize("disabled", ["fake_good", "fake-attn"])
def test_disabled_by_plugin_or_distribution_is_listed_but_not_imported(disabled: str, site: Callable[..., None]) -> None:
    site("site")
    made = load(disabled=[disabled, "fake_duplicate"])
    assert made.records["fake_good"].state == "disabled"
    assert made.records["fake_good"].error == ""
    assert "fake_attn.good" not in sys.modules
    assert ("fake_attn" in sys.modules) == (disabled == "fake_good")
    assert made.catalog.backends == {}


def test_the_environment_disables_plugins(site: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    site("site")
    monkeypatch.setenv("ATTNMUX_DISABLE_PLUGINS", "fake-attn")
    attnmux.reload_config()
    try:
        assert host.registry().records["fake_good"].state == "disabled"
    finally:
        monkeypatch.delenv("ATTNMUX_DISABLE_PLUGINS")
        monkeypatch.undo()
        attnmux.reload_config()


@pytest.mark.parametrize("folders", [("site", "second"), ("second", "site")])
def test_two_distributions_with_one_entry_point_name(folders: tuple[str, ...], site: Callable[..., None]) -> None:
    site(*folders)
    made = load(disabled=["fake_duplicate"])
    assert made.records["fake_good"].distribution == "fake-attn 1.0"
    assert made.records["fake_good"].state == "active"
    second = made.records["fake_good (fake-twin 2.0)"]
    assert second.state == "failed"
    assert second.error == "PluginError: a plugin named 'fake_good' is active already: disable one of them by its distribution"
    # a name whose first owner failed is free, and neither record hides the other
    assert made.records["fake_import_error"].state == "failed"
    assert made.records["fake_import_error (fake-twin 2.0)"].state == "active"
    assert made.catalog.providers["fake_twin"] == "fake_import_error (fake-twin 2.0)"
    made.unregister("fake_import_error (fake-twin 2.0)")
    assert "fake_twin" not in made.catalog.backends


def test_disabling_one_distribution_frees_the_name_for_the_other(site: Callable[..., None]) -> None:
    site("site", "second")
    made = load(disabled=["fake-attn"])
    assert made.records["fake_good"].state == "disabled"
    assert made.records["fake_good (fake-twin 2.0)"].state == "active"


def test_the_order_of_loading_does_not_follow_sys_path(site: Callable[..., None]) -> None:
    site("site")
    first = load()
    site("second")
    names = [n for n in load().records if "fake-twin" not in n]
    assert names == list(first.records) == sorted(first.records)


def test_built_ins_load_through_the_same_door() -> None:
    made = Registry(["attnmux.platforms.cpu", "attnmux.no_such_module"], entry_points=False)
    assert made.records["attnmux.platforms.cpu"].state == "active"
    assert made.records["attnmux.no_such_module"].error.startswith("ModuleNotFoundError: ")
    assert made.records["attnmux.no_such_module"].origin == "builtin"
    assert list(made.catalog.platforms) == ["cpu"]


def test_every_built_in_is_active() -> None:
    records = Registry(entry_points=False).records
    assert list(records) == list(BUILTINS)
    assert {record.name: record.error for record in records.values() if record.state != "active"} == {}


@pytest.mark.parametrize(
    ("contract", "ours", "accepted"),
    [("1.0", (1, 3), True), ("1.3", (1, 3), True), ("1.4", (1, 3), False), ("0.9", (1, 3), False), ("2.0", (1, 3), False), ("1.0", (2, 0), False)],
)
def test_the_major_must_be_equal_and_the_minor_not_above(
    contract: str, ours: tuple[int, int], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hookspecs, "CONTRACT", ours)
    made = registry()
    if accepted:
        made.register(plugin(contract=contract), "p")
        assert made.records["p"].state == "active"
    else:
        with pytest.raises(PluginError, match=f"speaks contract {contract}, this attnmux speaks {ours[0]}.{ours[1]}"):
            made.register(plugin(contract=contract), "p")


def raising() -> Iterator[BackendInfo]:
    yield info("half")
    raise RuntimeError("midway")


REFUSED = {
    "a name that is taken": (plugin(backends=[info("new"), info("a")]), "the name 'a' is taken: declared by fake0 and by p"),
    "a name of another kind": (plugin(compositions=[Composition("a", (("decode", "a"),))]), "the name 'a' is taken"),
    "a name twice in one plugin": (plugin(backends=[info("twice"), info("twice")]), "the name 'twice' is taken: declared by p and by p"),
    "an arch that is listed": (plugin(platforms=[platform(name="new")]), r"arch x86_64 is listed by platform lab_cpu \(fake0\) and by new \(p\)"),
    "an arch listed twice": (
        plugin(platforms=[platform(name="n1", device="cuda", arch="sm90"), platform(name="n2", device="cuda", arch="sm90")]),
        r"arch sm90 is listed by platform n1 \(p\) and by n2 \(p\)",
    ),
    "a hook that fails midway": (plugin(backends=raising), "attnmux_backends failed: RuntimeError: midway"),
    "no contract": (object(), "declares no contract version"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_registering_at_run_time_is_all_or_nothing(what: str) -> None:
    bad, message = REFUSED[what]
    made = registry(backends=[info("a")], platforms=[lab("a")])
    catalog, version = made.catalog, made.version
    with pytest.raises(PluginError, match=f"plugin 'p' was not registered: .*{message}") as caught:
        made.register(bad, "p")
    assert isinstance(caught.value, AttnmuxError)
    assert (made.catalog, made.version) == (catalog, version)
    assert "p" not in made.records
    made.register(plugin(backends=[info("new")]), "p")
    assert list(made.catalog.backends) == ["a", "new"]


def test_a_plugin_name_is_taken_once() -> None:
    made = registry(backends=[info("a")])
    with pytest.raises(PluginError, match="a plugin named 'fake0' is active already"):
        made.register(plugin(), "fake0")


def test_unregistering_forgets_everything_and_leaves_the_rest() -> None:
    base = plugin(backends=[info("a")], platforms=[lab("a")])
    made = registry(base)
    before = made.catalog
    extra = plugin(backends=[info("b")], compositions=[Composition("c", (("decode", "b"),))], orders=[Insertion("b", "why")])
    made.register(extra, "extra")
    version = made.version
    made.unregister("extra")
    assert made.catalog == before
    assert made.version > version
    made.register(extra, "extra")
    assert list(made.catalog.backends) == ["a", "b"]
    with pytest.raises(PluginError, match="no active plugin 'extr': did you mean 'extra'"):
        made.unregister("extr")


def test_hooks_are_called_once() -> None:
    calls: list[str] = []

    def counting() -> list[BackendInfo]:
        calls.append("called")
        return [info("a")]

    made = registry(plugin(backends=counting), plugin(backends=[info("b")]))
    made.unregister("fake1")
    assert calls == ["called"]
    assert list(made.catalog.backends) == ["a"]


def test_the_later_one_may_be_registered_again_when_the_first_is_gone() -> None:
    made = registry(plugin(backends=[info("a")]))
    rival = plugin(backends=[info("a", claim(head_size=OneOf(64)))])
    with pytest.raises(PluginError, match="taken"):
        made.register(rival, "rival")
    made.unregister("fake0")
    made.register(rival, "rival")
    assert made.catalog.providers == {"a": "rival"}


LOAD_FAILURES = [
    ("fake_attn.code_that_fails:Backend", "ImportError: libfake.so.1: cannot open shared object file"),
    ("no_such_package:Backend", "ModuleNotFoundError: No module named 'no_such_package'"),
    ("fake_plugins:NoSuchClass", "AttributeError: module 'fake_plugins' has no attribute 'NoSuchClass'"),
    ("fake_plugins:NoBackend", "TypeError: 'fake_plugins:NoBackend' is no subclass of attnmux.plugin.Backend"),
    ("fake_plugins:claim", "TypeError: 'fake_plugins:claim' is no subclass of attnmux.plugin.Backend"),
    ("fake_plugins:Unfinished", "TypeError: 'fake_plugins:Unfinished' does not define run"),
]


@pytest.mark.parametrize(("target", "error"), LOAD_FAILURES)
def test_a_backend_that_fails_to_load(target: str, error: str, site: Callable[..., None], install: Install, spec: AttentionSpec) -> None:
    site("site")
    made = install(registry(platforms=[lab("a>b")], backends=[info("a", implementation=target), info("b")]))
    assert attnmux.select(spec, "cpu").name == "a"
    with pytest.raises(PluginError) as caught:
        attnmux.Attention(spec, "cpu")
    assert str(caught.value) == f"backend 'a' (plugin fake0) failed to load: {error}"
    again = attnmux.select(spec, "cpu")
    assert again.name == "b"
    assert [(r.code, str(r)) for r in again.rejected["a"]] == [("load-failed", f"failed to load: {error}")]
    assert attnmux.Attention(spec, "cpu").selection.name == "b"
    with pytest.raises(attnmux.NoBackendError, match="failed to load"):
        attnmux.select(spec, "cpu", require="a")
    made.register(plugin(), "unrelated")
    assert attnmux.select(spec, "cpu").name == "b"


def test_a_backend_that_was_mended_loads_again(install: Install, spec: AttentionSpec) -> None:
    made = install(registry(plugin(platforms=[lab("a")]), plugin(backends=[info("a", implementation="no_such_package:Backend")])))
    with pytest.raises(PluginError):
        attnmux.Attention(spec, "cpu")
    made.unregister("fake1")
    made.register(plugin(backends=[info("a", implementation=TinyBackend)]), "mended")
    assert attnmux.Attention(spec, "cpu").selection.name == "a"


def test_the_doctor_shows_every_plugin_that_was_set_aside(site: Callable[..., None], install: Install) -> None:
    site("site")
    made = install(Registry(disabled=["fake_duplicate"]))
    report = examine(check for check in made.catalog.health_checks if check.name in ("plugins", "fake license"))
    failures = {finding.text.partition(" (")[0]: finding for _, finding in report if finding.status == "fail"}
    assert set(failures) == set(BROKEN) - {"fake_duplicate"}
    assert "fake-attn 1.0" in failures["fake_exits"].text
    assert BROKEN["fake_exits"] in failures["fake_exits"].text
    assert "ATTNMUX_DISABLE_PLUGINS=fake_exits" in failures["fake_exits"].hint
    assert ("fake license", Finding("ok", "valid")) in report


def test_a_health_check_that_raises_is_a_finding() -> None:
    def broken() -> list[Finding]:
        raise OSError("no licence server")

    assert examine([HealthCheck("x", broken)]) == [("x", Finding("fail", "the check itself failed: OSError: no licence server"))]


def test_the_hookspecs_ask_for_what_the_registry_reads() -> None:
    made = registry()
    hooks = [name for name in vars(made._manager.hook) if name.startswith("attnmux_")]
    assert sorted(hooks) == sorted(made._declarations("nobody"))
    assert hookimpl.project_name == "attnmux"
    assert CONTRACT == (1, 0)


def test_the_fakes_are_what_the_tests_say() -> None:
    listed = (Path(__file__).parents[1] / "fakes/site/fake_attn-1.0.dist-info/entry_points.txt").read_text()
    assert {line.partition(" = ")[0] for line in listed.splitlines() if " = " in line} == {*BROKEN, "fake_good", "fake_older"}

"""``pytest --attnmux-backend NAME`` and the fixtures, in inner pytest runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnmux.dispatch import host
from attnmux.dispatch.errors import PluginError

pytest_plugins = "pytester"


@pytest.fixture
def suite(pytester, declare):
    """A project with one test of its own, in a process whose registry is the test's."""
    pytester.makepyfile(test_own="def test_own(): pass")
    return pytester


def test_every_check_is_a_test(suite, declare, wrong):
    declare(wrong.Honest)
    result = suite.runpytest_inprocess("--attnmux-backend", "acme", "--attnmux-quick", "-p", "no:cacheprovider")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] > 100
    assert outcomes["skipped"] == 2
    assert "failed" not in outcomes
    result.stdout.fnmatch_lines(["attnmux: acme on cpu"])
    result.stdout.no_fnmatch_line("*test_own*")


def test_failures_are_short_and_say_what_was_wanted(suite, declare, wrong):
    declare(wrong.IgnoresSinks)
    result = suite.runpytest_inprocess("--attnmux-backend", "acme", "--attnmux-quick", "-k", "features and sinks", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["acme: the answer is the one for sinks=False: sinks is ignored", "wanted: the answer is not the one without sinks", "*1 failed*deselected*"]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_own_tests_run_beside_it_when_they_are_named(suite, declare):
    declare()
    result = suite.runpytest_inprocess(
        "test_own.py", "--attnmux-backend", "acme", "--attnmux-quick", "-k", "own or declaration", "-p", "no:cacheprovider"
    )
    assert result.parseoutcomes()["passed"] == 8


def test_expected_failures_come_from_the_configuration(suite, declare, wrong):
    declare(wrong.IgnoresSinks)
    suite.makeini(
        """
        [pytest]
        attnmux_expected_failures =
            features/claim1-sinks-fp32: driver too old
            numerics/claim1-plain: works by now
            numerics/claim7-plain: of another version
        """
    )
    only = "features/claim1-sinks-fp32 or numerics/claim1-plain"
    result = suite.runpytest_inprocess(
        "--attnmux-backend", "acme", "--attnmux-quick", "-k", f"({only}) and not limits and not long and not write", "-rA"
    )
    assert result.parseoutcomes() | {"warnings": 0, "warning": 0, "deselected": 0} == {
        "xfailed": 1,
        "failed": 1,
        "warnings": 0,
        "warning": 0,
        "deselected": 0,
    }
    result.stdout.fnmatch_lines(["*numerics/claim7-plain*matches no check*"])
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


def test_wrong_names_and_lines_are_usage_errors(suite, declare):
    declare()
    result = suite.runpytest_inprocess("--attnmux-backend", "acne")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unknown backend 'acne': did you mean 'acme'*"])
    suite.makeini("[pytest]\nattnmux_expected_failures = numerics/claim1-plain")
    result = suite.runpytest_inprocess("--attnmux-backend", "acme")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_the_registry_of_a_test_is_its_own(attnmux_registry):
    assert host.registry() is attnmux_registry
    assert all(record.origin == "builtin" for record in attnmux_registry.records.values())
    with pytest.raises(PluginError):
        attnmux_registry.register(object(), "nothing")


def test_the_usual_registry_comes_back():
    usual = host.registry()
    with host.using(type(usual)((), entry_points=False)):
        assert host.registry() is not usual
        assert host.devices() == ()
    assert host.registry() is usual
    assert host.devices()


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, attnmux.testing.pytest_plugin\nprint(*[m for m in ('torch', 'rich', 'pluggy', 'hypothesis', 'attnmux.dispatch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() in ([], ["pluggy"])  # pytest itself needs pluggy

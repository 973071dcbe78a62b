"""The pytest plugin: ``pytest --attnmux-backend NAME``, and fixtures. Loaded by every pytest run, so it imports nothing else at first.

Expected failures stand in the configuration, one ``check id: reason`` a line::

    [tool:pytest]
    attnmux_expected_failures =
        numerics/claim1-sinks: needs driver 600
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnmux.dispatch.registry import Registry
    from attnmux.testing.cases import Case
    from attnmux.testing.check import Check
    from attnmux.testing.sampling import Subject

_SUBJECTS: pytest.StashKey[list[Subject]] = pytest.StashKey()
_EXPECTED: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnmux", "attention backends")
    group.addoption(
        "--attnmux-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="hold this backend against the oracle: every claim, and every refusal; repeatable. Without test paths nothing else runs.",
    )
    group.addoption("--attnmux-device", metavar="DEVICE", help="where --attnmux-backend runs (default: the first device it can run on)")
    group.addoption("--attnmux-quick", action="store_true", help="with --attnmux-backend: each size and feature alone, fewer combinations")
    group.addoption("--attnmux-seed", type=int, default=0, metavar="N", help="with --attnmux-backend: seed of all inputs")
    parser.addini("attnmux_expected_failures", "lines 'check id: reason' of checks that are known to fail", type="linelist", default=[])


@pytest.hookimpl(trylast=True)  # a conftest may register its backend in the same hook
def pytest_configure(config: pytest.Config) -> None:
    names = config.getoption("attnmux_backend")
    if not names:
        return
    from attnmux.dispatch.errors import AttnmuxError
    from attnmux.testing.kit import subject_of

    try:
        config.stash[_SUBJECTS] = [subject_of(name, config.getoption("attnmux_device")) for name in names]
    except AttnmuxError as error:
        raise pytest.UsageError(f"--attnmux-backend: {error}") from error
    config.stash[_EXPECTED] = _expected_failures(config)
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = []  # no paths were asked for: the kit alone


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = []
    for subject in config.stash.get(_SUBJECTS, []):
        why = f", declaration and refusals only: {subject.stopped}" if subject.stopped else ""
        lines.append(f"attnmux: {subject.name} on {subject.device.name}{why}")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if _SUBJECTS not in config.stash:
        return
    from attnmux.testing.kit import warn_of_stale

    expected = config.stash[_EXPECTED]
    found: list[Check] = []
    for subject in config.stash[_SUBJECTS]:
        collector = BackendCollector.from_parent(session, name=f"attnmux[{subject.name}]", backend=subject.name, expected=expected)
        added = list(collector.collect())
        found += [item.check for item in added]
        items.extend(added)
    warn_of_stale(expected, found)


def _expected_failures(config: pytest.Config) -> dict[str, str]:
    expected = {}
    for line in config.getini("attnmux_expected_failures"):
        check, colon, reason = line.partition(":")
        if not (colon and reason.strip()):
            raise pytest.UsageError(f"attnmux_expected_failures: {line!r}, wanted 'check id: reason'")
        expected[check.strip()] = reason.strip()
    return expected


class BackendCollector(pytest.Collector):
    """All checks of one backend."""

    def __init__(self, *, backend: str, expected: dict[str, str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.backend, self.expected = backend, expected

    def collect(self) -> Iterator[CheckItem]:
        from attnmux.testing.kit import backend_checks

        option = self.config.option
        for check in backend_checks(self.backend, option.attnmux_device, quick=option.attnmux_quick, seed=option.attnmux_seed):
            item: CheckItem = CheckItem.from_parent(self, name=check.id, check=check)
            if check.id in self.expected:
                item.add_marker(pytest.mark.xfail(reason=self.expected[check.id], strict=True))
            yield item


class CheckItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Check, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        self.check.run()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from attnmux.testing.check import CheckFailed

        if isinstance(excinfo.value, CheckFailed):
            return f"{self.check.backend}: {excinfo.value}\nwanted: {self.check.summary}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.config.rootpath, None, f"{self.check.backend}: {self.check.id}"


@pytest.fixture
def attnmux_registry() -> Iterator[Registry]:
    """The process's registry for one test: the built-in plugins and no installed ones. Register your own; nothing of it stays."""
    from attnmux.dispatch import host
    from attnmux.dispatch.registry import Registry

    with host.using(Registry(entry_points=False)) as registry:
        yield registry


@pytest.fixture
def attention_case() -> Callable[..., Case]:
    """:func:`attnmux.testing.make_case`: inputs of one call in dirty memory, from a spec, rows and a seed."""
    from attnmux.testing.cases import make_case

    return make_case

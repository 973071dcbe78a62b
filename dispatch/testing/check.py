"""What the kit produces: a :class:`Check` to run, a :class:`Result` of each, and a :class:`Report` of all."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped", "expected failure", "unexpected pass"]


class CheckFailed(AssertionError):
    """A backend broke a promise; the message says which, with the numbers."""


class Skip(unittest.SkipTest):
    """A check does not apply here. Test runners that know ``unittest.SkipTest`` show it as skipped."""


def require(condition: object, message: str) -> None:
    """Fail the running check unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


@dataclass(frozen=True, slots=True)
class Check:
    """One promise to be held against a backend.

    Args:
        id: ``concern/what``; stable, so that expected failures can name it.
        backend: whose promise.
        summary: the promise in one sentence.
        body: raises :class:`CheckFailed` or :class:`Skip`.
    """

    id: str
    backend: str
    summary: str
    body: Callable[[], None]

    @property
    def concern(self) -> str:
        return self.id.partition("/")[0]

    def run(self) -> None:
        """Raise if the promise is broken.

        Raises:
            CheckFailed: it is; any other exception means that the backend raised.
            Skip: it does not apply on this machine.
        """
        self.body()


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check."""

    check: Check
    status: Status
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status not in ("failed", "unexpected pass")

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.check.id, "concern": self.check.concern, "status": self.status, "detail": self.detail, "seconds": round(self.seconds, 4)}


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one backend.

    Args:
        backend, device: what ran where.
        results: in the order of the checks.
        stale: expected failures whose ids no check has.
        stopped: why nothing could run against the oracle here, or empty.
    """

    backend: str
    device: str
    results: tuple[Result, ...]
    stale: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def ok(self) -> bool:
        """No failure and no unexpected pass; skipped checks do not count."""
        return all(result.ok for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        return tuple(result for result in self.results if not result.ok)

    def count(self, status: Status, concern: str | None = None) -> int:
        return sum(r.status == status and concern in (None, r.check.concern) for r in self.results)

    def raise_if_failed(self) -> None:
        """Raise :class:`CheckFailed` with every failure."""
        if not self.ok:
            lines = [f"{len(self.failures)} of {len(self.results)} checks of {self.backend} on {self.device} failed"]
            raise CheckFailed("\n".join([*lines, *(f"  {r.check.id}: {r.detail or r.status}" for r in self.failures)]))

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "device": self.device,
            "ok": self.ok,
            "stopped": self.stopped,
            "stale_expected_failures": list(self.stale),
            "results": [result.to_dict() for result in self.results],
        }


def run_check(check: Check, expected: str | None) -> Result:
    """Run one check; ``expected`` is the reason why it is known to fail."""
    start = time.perf_counter()
    status: Status = "passed" if expected is None else "unexpected pass"
    detail = "" if expected is None else f"expected to fail ({expected}), but it passed: drop it from the expected failures"
    try:
        check.run()
    except Skip as reason:
        status, detail = "skipped", str(reason)
    except Exception as error:  # whatever a backend raises is a finding about it
        detail = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        status = "failed" if expected is None else "expected failure"
    return Result(check, status, detail, time.perf_counter() - start)


def run_checks(
    backend: str, device: str, stopped: str, checks: Iterable[Check], expected: Mapping[str, str], progress: Callable[[Result], None] | None
) -> Report:
    """Run checks one by one. ``progress`` is told of each result."""
    results = []
    for check in checks:
        results.append(result := run_check(check, expected.get(check.id)))
        if progress is not None:
            progress(result)
    return Report(backend, device, tuple(results), tuple(sorted(set(expected) - {r.check.id for r in results})), stopped)

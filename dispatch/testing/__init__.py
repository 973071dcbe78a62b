"""The conformance kit: every claim of a backend against the oracle, and every refusal.

Without pytest: ``check_backend("acme").raise_if_failed()``. With it: ``pytest --attnmux-backend acme``, or in a test module::

    @attnmux.testing.parametrize_backend_checks("acme", expected_failures={"numerics/...": "why"})
    def test_conformance(check):
        check.run()

Loading this package imports nothing else; the names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnmux.testing.cases import Case as Case
    from attnmux.testing.cases import make_case as make_case
    from attnmux.testing.check import Check as Check
    from attnmux.testing.check import Report as Report
    from attnmux.testing.check import Result as Result
    from attnmux.testing.kit import backend_checks as backend_checks
    from attnmux.testing.kit import check_backend as check_backend
    from attnmux.testing.kit import parametrize_backend_checks as parametrize_backend_checks
    from attnmux.testing.rows import Row as Row
    from attnmux.testing.rows import mixed_rows as mixed_rows

_HOMES = {
    "Case": "cases",
    "Check": "check",
    "Report": "check",
    "Result": "check",
    "Row": "rows",
    "backend_checks": "kit",
    "check_backend": "kit",
    "make_case": "cases",
    "mixed_rows": "rows",
    "parametrize_backend_checks": "kit",
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'attnmux.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"attnmux.testing.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

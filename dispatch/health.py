"""The types of ``attnmux doctor``: checks return findings; only the command line prints them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report; ``fail`` makes its exit status 1."""

    status: Literal["ok", "warn", "fail"]
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A named check; ``run`` imports what it needs itself."""

    name: str
    run: Callable[[], Iterable[Finding]]

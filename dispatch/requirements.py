"""What a backend needs of the machine besides the device: packages, programs, settings. Probed without importing anything."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, runtime_checkable

from attnmux.dispatch.reasons import Reason


@runtime_checkable
class Requirement(Protocol):
    """Frozen and hashable. ``probe`` looks at the machine, ``judge`` is pure."""

    def probe(self) -> str | None:
        """What is there (a version, a path, a value), or ``None``."""

    def judge(self, found: str | None) -> Reason | None:
        """The reason why ``found`` does not do, or ``None``."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Package:
    """An installed distribution, by its name on the package index.

    Args:
        name: the distribution, for instance ``flashinfer-python``.
        specifier: a version specifier (PEP 440), or empty for any.
        install: what to install to get it; by default the distribution itself.
        also: other distributions that provide the same modules, looked for after ``name``.
    """

    name: str
    specifier: str = ""
    install: str = ""
    also: tuple[str, ...] = ()

    def probe(self) -> str | None:
        for name in (self.name, *self.also):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return None

    def judge(self, found: str | None) -> Reason | None:
        wanted, todo = f"{self.name}{self.specifier}", f"pip install '{self.install or self.name + self.specifier}'"
        if found is None:
            return Reason("package", self.name, "not installed", wanted, todo)
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(self.specifier).contains(found, prereleases=True):
            return Reason("package", self.name, f"{found} is installed", wanted, todo)
        return None


@dataclass(frozen=True, slots=True)
class Program:
    """An executable on the path."""

    name: str
    todo: str = ""

    def probe(self) -> str | None:
        return shutil.which(self.name)

    def judge(self, found: str | None) -> Reason | None:
        return None if found else Reason("tool", self.name, "not on the path", f"the program {self.name}", self.todo)


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable with a given value, set before Python starts."""

    name: str
    value: str

    def probe(self) -> str | None:
        return os.environ.get(self.name)

    def judge(self, found: str | None) -> Reason | None:
        if found == self.value:
            return None
        offered = "it is not set" if found is None else f"it is {found!r}"
        return Reason("setting", self.name, offered, f"{self.name}={self.value}", f"export {self.name}={self.value}")


@dataclass(frozen=True)
class Toolchain:
    """A snapshot of every probe that the registered backends ask for; selection reads only this."""

    found: Mapping[Requirement, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, requirements: Iterable[Requirement]) -> Toolchain:
        """Probe this machine."""
        return cls({requirement: requirement.probe() for requirement in dict.fromkeys(requirements)})

    def unmet(self, requirements: Iterable[Requirement]) -> tuple[Reason, ...]:
        """The reasons of those requirements that this machine does not meet."""
        judged = (_judge(requirement, self.found.get(requirement)) for requirement in requirements)
        return tuple(reason for reason in judged if reason)


@lru_cache(maxsize=1024)
def _judge(requirement: Requirement, found: str | None) -> Reason | None:
    """Pure, and asked for every candidate of every row class: parsing versions each time took a third of a selection."""
    return requirement.judge(found)

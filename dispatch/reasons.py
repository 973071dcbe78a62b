"""Why a candidate was passed over, as data. The sentence is derived, never written by hand beside a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass

CODES: dict[str, str] = {
    "unsupported": "The backend's claims do not cover this value of a field of the spec.",
    "device": "The backend claims nothing for this device.",
    "row-class": "The backend claims nothing for this row class on this device.",
    "package": "A package that the backend needs is missing or has another version.",
    "tool": "A program that the backend needs (a compiler, say) is not on the path.",
    "setting": "An environment variable that the backend needs is not set.",
    "not-in-yet": "The backend is declared, but its code is not part of this version.",
    "load-failed": "The backend's module failed to import.",
    "denied": "A deny setting names the backend.",
    "not-required": "A require setting names another backend.",
    "not-ordered": "No order of this platform names the backend; prefer or require can.",
    "not-registered": "An order names a backend that no active plugin provides.",
}
"""Every code, with what it means; ``docs/reasons.md`` is made from this table."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason.

    Args:
        code: a key of :data:`CODES`.
        field: the spec field, ``device``, ``row_class``, a package or a backend name.
        offered: the value at hand, as shown to people.
        wanted: what would have been accepted.
        todo: what a user can do about it, or empty.
    """

    code: str
    field: str
    offered: str
    wanted: str
    todo: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"unknown reason code {self.code!r}: known: {', '.join(CODES)}")

    def __str__(self) -> str:
        if self.code == "unsupported":
            if self.wanted == "no":
                return f"{self.field} {self.offered}: not supported"
            return f"{self.field} {self.offered}: takes {self.wanted}"
        if self.code in ("device", "row-class"):
            return f"{self.field} {self.offered}: takes {self.wanted}"
        if self.code in ("package", "tool", "setting"):
            return f"needs {self.wanted}: {self.offered}"
        if self.code == "not-in-yet":
            return "declared, its code is not in this version yet"
        if self.code == "load-failed":
            return f"failed to load: {self.offered}"
        if self.code == "denied":
            return f"denied by {self.offered}"
        if self.code == "not-required":
            return f"{self.offered} requires {self.wanted}"
        if self.code == "not-registered":
            return "no active plugin provides it"
        return "in no order for this device: prefer or require it by name"

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "text": str(self)}

"""Everything attnmux raises on purpose.

Wrong arguments raise ``ValueError`` or ``TypeError`` with a message built by :func:`complaint`. The rest::

    AttnmuxError
    +-- ConfigError(ValueError)         a setting from an argument, context, environment or file is wrong
    +-- UnknownDeviceError(ValueError)  no platform recognises the device
    +-- PluginError                     a plugin broke the contract (name taken, wrong type, failed to load)
    +-- NoBackendError(RuntimeError)    a row class has no backend; carries the whole selection
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmux.dispatch.selection import Selection


class AttnmuxError(Exception):
    """Base of the errors below."""


class ConfigError(AttnmuxError, ValueError):
    """A setting names something that does not exist or contradicts another setting."""


class UnknownDeviceError(AttnmuxError, ValueError):
    """The device string is malformed or no platform recognises it."""


class PluginError(AttnmuxError):
    """A plugin broke the contract: a name registered twice, a wrong type, an implementation that fails to load."""


class NoBackendError(AttnmuxError, RuntimeError):
    """No backend can run some row class of a spec. ``selection`` holds every candidate with its reasons."""

    def __init__(self, message: str, selection: Selection) -> None:
        super().__init__(message)
        self.selection = selection

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[str, Selection]]:
        return NoBackendError, (str(self), self.selection)  # engines send errors between processes


def complaint(argument: str, got: object, wanted: str, todo: str = "") -> str:
    """One sentence in the order every attnmux error uses: what, offered, wanted, what to do."""
    return f"{argument} is {got}, wanted {wanted}" + (f"; {todo}" if todo else "")


def suggest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """``did you mean ...`` for a near miss, and always the list of what exists."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    listing = ", ".join(known) if known else "none"
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {listing}"

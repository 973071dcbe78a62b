"""One prompt on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what was generated from it, and where its keys lie.

    Args:
        index: its number, for display.
        prompt: token ids, at least one.
        max_new_tokens: when to stop at the latest.
        stop_tokens: ids that end it; they are kept in ``generated``.

    Attributes:
        generated: new token ids.
        computed: tokens whose keys and values are in the cache.
        pages: pages that hold them, in order.
        preemptions: how often its pages were taken away.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    generated: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    state: State = "waiting"
    preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens; all but the last are computed while it decodes."""
        return len(self.prompt) + len(self.generated)

    @property
    def pending(self) -> int:
        """Tokens the model has still to see before the next one can be chosen."""
        return self.num_tokens - self.computed

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and bool(self.generated)

    def tokens(self, first: int, last: int) -> list[int]:
        """Token ids ``[first, last)`` of prompt and generated text."""
        return (self.prompt + self.generated)[first:last]

    def accept(self, token: int) -> bool:
        """Append a new token; True if it is the last one."""
        self.generated.append(token)
        return token in self.stop_tokens or len(self.generated) >= self.max_new_tokens

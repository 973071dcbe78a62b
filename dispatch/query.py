"""One question to the selector: a spec, a device and a row class, with every field reachable by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import SPEC_FIELD_NAMES, AttentionSpec, RowClass

Lengths = Literal["exact", "upper_bound"]
"""What ``Batch.seq_lens_cpu`` promises: the key lengths themselves, or a bound on them."""

QUERY_FIELDS: tuple[str, ...] = ("device", "row_class", "lengths", "group", *SPEC_FIELD_NAMES)
"""Every field that a claim or a condition can speak of."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a claim is held against."""

    spec: AttentionSpec
    device: Device
    row_class: RowClass
    lengths: Lengths = "exact"

    def value(self, field: str) -> Any:
        """The value of one of :data:`QUERY_FIELDS`."""
        if field in ("device", "row_class", "lengths"):
            return getattr(self, field)
        return getattr(self.spec, field)

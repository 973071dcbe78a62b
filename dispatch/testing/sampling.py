"""From a claim to specs that stand for it: a plain one, every size and feature alone, and features in pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice, product
from typing import Any

import torch

from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import AnyOf, Constraint, OneOf, Range
from attnmux.dispatch.device import Device
from attnmux.dispatch.query import Lengths, Query
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.spec import COMPUTE_DTYPES, FP8_DTYPES, ROW_CLASSES, AttentionSpec, RowClass, show
from attnmux.testing.features import FEATURES, Feature

VALUES: dict[str, tuple[Any, ...]] = {
    "num_q_heads": (4, 2, 6, 8, 16, 1),
    "num_kv_heads": (2, 4, 1, 8, 16),
    "head_size": (64, 128, 32, 80, 256, 96, 72, 16, 512, 192, 8),
    "dtype": COMPUTE_DTYPES,
    "v_head_size": (None, 32, 64, 128, 512),
    "scale": (None, 0.31),
    "q_dtype": (None, *FP8_DTYPES),
    "kv_dtype": (None, *FP8_DTYPES),
    "kv_scale": (None, "tensor", "head"),
    "page_size": (16, None, 1, 64, 32, 128, 256, 7),
    "kv_layout": ("NHD", "HND"),
    "attn_type": ("decoder", "encoder_only", "cross"),
    "causal": (None, True, False, "per_sequence"),
    "sliding_window": (None, 5),
    "window_right": (None, 1),
    "chunk": (None, (8, 0)),
    "softcap": (None, 2.0),
    "alibi": (None, "linear", "sqrt"),
    "sinks": (False, True),
    "mm_prefix": (None, "override_window", "within_window"),
    "rswa_window": (None, 4),
    "sparse": (None,),
    "return_lse": (False, True),
    "batch_invariant": (False, True),
}
"""What to try for each field of a spec, the plainest first. ``None`` of a derived field follows the field it derives from."""

SIZES = ("head_size", "dtype", "page_size", "v_head_size")
_DERIVED = ("v_head_size", "scale", "q_dtype", "kv_dtype", "causal")
_PROVISIONAL = AttentionSpec(4, 2, 64, torch.bfloat16)
_TRIES = 20_000


@dataclass(frozen=True, slots=True)
class Subject:
    """The backend under test, where it is judged, and how thoroughly.

    Args:
        info: its declaration.
        device: where; a dry one when the backend cannot run here.
        toolchain: what this machine has.
        seed: of every case.
        quick: sizes and features alone, fewer pairs.
        stopped: why nothing can run, or empty.
    """

    info: BackendInfo
    device: Device
    toolchain: Toolchain
    seed: int = 0
    quick: bool = False
    stopped: str = ""

    @property
    def name(self) -> str:
        return self.info.name

    def claims(self) -> list[tuple[int, Claim]]:
        """Claims on this device, with their places in the declaration, from 1; where it runs, those whose requirements are met."""
        met = [bool(self.stopped) or not self.toolchain.unmet(claim.requires) for claim in self.info.claims]
        return [(i, claim) for i, claim in enumerate(self.info.claims, 1) if self.device in claim.device and met[i - 1]]

    def classes(self, spec: AttentionSpec, lengths: Lengths = "exact") -> tuple[RowClass, ...]:
        """Row classes of the spec that some claim covers, as declared."""
        return tuple(c for c in spec.row_classes if any(not claim.refusals(Query(spec, self.device, c, lengths)) for _, claim in self.claims()))


@dataclass(frozen=True, slots=True)
class Variant:
    """A claimed spec.

    Args:
        label: ``claim2-sliding_window+sinks``; unique within a backend.
        spec: the spec.
        classes: the row classes that the backend claims of it.
        features: those that were added to the claim's plain spec.
        lengths: what host mirrors promise.
    """

    label: str
    spec: AttentionSpec
    classes: tuple[RowClass, ...]
    features: tuple[Feature, ...] = ()
    lengths: Lengths = "exact"


def variants(subject: Subject) -> Iterator[Variant]:
    """Specs that stand for all claims on the subject's device, each spec once."""
    seen: set[tuple[AttentionSpec, Lengths]] = set()
    for number, claim in subject.claims():
        base = base_spec(claim, subject.device)
        if base is None:
            continue  # the declaration check "claims-can-be-met" says so
        for label, spec, features, lengths in _around(claim, base, subject):
            if (spec, lengths) not in seen and (classes := subject.classes(spec, lengths)):
                seen.add((spec, lengths))
                yield Variant(f"claim{number}-{label}", spec, classes, features, lengths)


@lru_cache(maxsize=256)
def base_spec(claim: Claim, device: Device) -> AttentionSpec | None:
    """The plainest spec that a claim covers, or ``None`` when none of the usual values fits."""
    for row_class in ROW_CLASSES[::-1]:
        provisional = Query(_PROVISIONAL, device, row_class)
        if not accepts(claim.row_class, row_class, provisional):
            continue
        options = [_options(claim, field, row_class, provisional) for field in VALUES]
        for values in islice(product(*options), _TRIES):
            spec = changed(None, dict(zip(VALUES, values, strict=True)))
            if spec is not None and row_class in spec.row_classes and covers(claim, spec, device, row_class):
                return spec
    return None


def covers(claim: Claim, spec: AttentionSpec, device: Device, row_class: RowClass, lengths: Lengths = "exact") -> bool:
    """Whether a claim refuses nothing."""
    return row_class in spec.row_classes and not claim.refusals(Query(spec, device, row_class, lengths))


def changed(base: AttentionSpec | None, changes: dict[str, Any]) -> AttentionSpec | None:
    """A changed spec, or ``None`` where the combination has no meaning."""
    try:
        return AttentionSpec(**changes) if base is None else base.replace(**changes)
    except ValueError:
        return None


def named_values(constraint: Constraint) -> tuple[Any, ...]:
    """The values that a constraint itself names: the members of a list, the ends of a range."""
    if isinstance(constraint, OneOf):
        return constraint.values
    if isinstance(constraint, Range):
        lowest = -(-max(constraint.lo, 1) // constraint.of) * constraint.of
        return (lowest, *([constraint.hi] if constraint.hi is not None else []), *([None] if constraint.optional else []))
    if isinstance(constraint, AnyOf):
        return tuple(value for part in constraint.parts for value in named_values(part))
    return ()


def accepts(constraint: Constraint, value: Any, query: Query) -> bool:
    """Whether a constraint accepts a value; one that raises does not (a declaration check reports it)."""
    try:
        return bool(constraint.accepts(value, query))
    except Exception:
        return False


def _options(claim: Claim, field: str, row_class: RowClass, query: Query) -> list[Any]:
    constraint = claim.constraint(field)
    values = dict.fromkeys((*VALUES[field], *named_values(constraint)))
    found = [v for v in values if (v is None and field in _DERIVED) or accepts(constraint, v, query)]
    return [v for v in found if v is not None] if field == "mm_prefix" and row_class == "image" else found


_Found = tuple[str, AttentionSpec, tuple[Feature, ...], Lengths]


def _around(claim: Claim, base: AttentionSpec, subject: Subject) -> Iterator[_Found]:
    """The plain spec of a claim, and its claimed neighbours."""
    device, quick = subject.device, subject.quick
    yield "plain", base, (), "exact"
    yield from _sizes(claim, base, device, quick)
    precise = changed(base, {"dtype": torch.float32})
    featured = _featured(claim, base, device)
    for feature, spec in featured:
        yield feature.name, spec, (feature,), "exact"
    if precise is not None and precise != base and _claimed(claim, precise, device):
        for feature, spec in _featured(claim, precise, device):  # 16-bit rounding hides small mistakes
            yield f"{feature.name}-fp32", spec, (feature,), "exact"
    if _claimed(claim, base, device, "upper_bound"):
        yield "upper_bound", base, (), "upper_bound"
        for feature, spec in featured:
            if not quick and _claimed(claim, spec, device, "upper_bound"):
                yield f"{feature.name}-upper_bound", spec, (feature,), "upper_bound"
    yield from _pairs(claim, featured, device, quick)


def _sizes(claim: Claim, base: AttentionSpec, device: Device, quick: bool) -> Iterator[_Found]:
    for field in SIZES:
        values = dict.fromkeys((*VALUES[field], *named_values(claim.constraint(field))))
        specs = [(value, spec) for value in values if (spec := changed(base, {field: value})) != base and _claimed(claim, spec, device)]
        for value, spec in specs[: 3 if quick else None]:
            yield f"{field}={_shown(value)}", spec, (), "exact"  # type: ignore[misc]  # _claimed(None) is False
    for q_heads, kv_heads in ((4, 4), (6, 1), (1, 1), (16, 2)):
        heads = changed(base, {"num_q_heads": q_heads, "num_kv_heads": kv_heads})
        if heads is not None and _claimed(claim, heads, device):
            yield f"heads={q_heads}/{kv_heads}", heads, (), "exact"


def _featured(claim: Claim, base: AttentionSpec, device: Device) -> list[tuple[Feature, AttentionSpec]]:
    found = [(feature, changed(base, dict(feature.on))) for feature in FEATURES]
    return [(feature, spec) for feature, spec in found if spec is not None and spec != base and _claimed(claim, spec, device)]


def _pairs(claim: Claim, featured: list[tuple[Feature, AttentionSpec]], device: Device, quick: bool) -> Iterator[_Found]:
    apart = [(f, spec) for f, spec in featured if f.paired and not (f.image_only and not covers(claim, spec, device, "image"))]
    for (one, spec), (other, _) in combinations(apart, 2):
        if set(one.on) & set(other.on) or (quick and "sliding_window" not in (one.name, other.name)):
            continue
        both = changed(spec, dict(other.on))
        if both is not None and _claimed(claim, both, device):
            yield f"{one.name}+{other.name}", both, (one, other), "exact"


def _claimed(claim: Claim, spec: AttentionSpec | None, device: Device, lengths: Lengths = "exact") -> bool:
    return spec is not None and any(covers(claim, spec, device, c, lengths) for c in spec.row_classes)


def _shown(value: Any) -> str:
    return "packed" if value is None else show(value)

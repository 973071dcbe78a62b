"""The support matrix: every cell comes from the constraint objects that also decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnmux.dispatch.claims import CLAIM_FIELDS, BackendInfo, Claim
from attnmux.dispatch.registry import Catalog

FEATURES = ("sliding_window", "chunk", "softcap", "alibi", "sinks", "mm_prefix", "rswa_window", "return_lse", "batch_invariant")


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One claim of one backend."""

    backend: str
    cells: dict[str, str]
    state: str


def matrix(catalog: Catalog) -> list[MatrixRow]:
    """A row a claim, in the order of registration."""
    return [MatrixRow(info.name, _cells(claim), run_state(info)) for info in catalog.backends.values() for claim in info.claims]


def run_state(info: BackendInfo) -> str:
    """``run on: H200 2026-12-01 (...)``, or what is missing."""
    if info.tested_on:
        return "run on: " + "; ".join(f"{t.hardware} {t.date} ({t.versions})" for t in info.tested_on)
    return "declared, code not in yet" if info.implementation is None else "declared, not run"


def _cells(claim: Claim) -> dict[str, str]:
    return {field: claim.constraint(field).cell() for field in CLAIM_FIELDS}


def features(cells: dict[str, str]) -> str:
    """The optional features of a claim in one cell."""
    named = {f: cells[f] for f in FEATURES if cells[f]}
    return ", ".join(f if value in ("yes", "any") or value.endswith("+ packed") else f"{f} ({value})" for f, value in named.items())


def markdown(catalog: Catalog) -> str:
    """The table of ``docs/support.md``."""
    lines = [
        "| backend | devices | rows | head size | dtype | cache | page | layout | types | causal | features | state |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in matrix(catalog):
        c: dict[str, Any] = {name: value.replace("|", "/") for name, value in row.cells.items()}
        size = c["head_size"] if c["v_head_size"].startswith("=") else f"{c['head_size']} / v {c['v_head_size']}"
        cells = (row.backend, c["device"], c["row_class"], size, c["dtype"], c["kv_dtype"], c["page_size"], c["kv_layout"])
        lines.append("| " + " | ".join((*cells, c["attn_type"], c["causal"], features(c), row.state)) + " |")
    return "\n".join(lines) + "\n"

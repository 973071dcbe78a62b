"""The support matrix: every cell comes from the constraint objects that also decide."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.claims import CLAIM_FIELDS, BackendInfo, Claim
from attnmux.dispatch.device import Device

FEATURES = ("sliding_window", "chunk", "softcap", "alibi", "sinks", "mm_prefix", "rswa_window", "return_lse", "batch_invariant")


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One claim of one backend."""

    backend: str
    cells: dict[str, str]
    state: str


def matrix(catalog: Catalog) -> list[MatrixRow]:
    """A row a claim, in the order of registration."""
    return [MatrixRow(info.name, _cells(claim), run_state(info, claim)) for info in catalog.backends.values() for claim in info.claims]


def run_state(info: BackendInfo, claim: Claim | None = None) -> str:
    """``run on: H200 2026-12-01 (...)`` for the devices of a claim (of any claim when ``None``), or what is missing."""
    runs = [run for run in info.tested_on if claim is None or _ran_on(run.device) in claim.device]
    if runs:
        return "run on: " + "; ".join(f"{run.hardware} {run.date} ({run.versions})" for run in runs)
    return "declared, code not in yet" if info.implementation is None else "declared, not run"


def _ran_on(device: str) -> Device:
    kind, _, arch = device.partition(":")
    return Device(kind, arch, "", "")


def _cells(claim: Claim) -> dict[str, str]:
    cells = {field: claim.constraint(field).cell() for field in CLAIM_FIELDS}
    cells["causal"] = " ".join(claim.causal.wants().replace(" or ", ", ").split(", "))  # no feature: "no" is an answer of its own
    return cells


def features(cells: dict[str, str]) -> str:
    """The optional features of a claim in one cell."""
    limits = {f: cells[f].removesuffix(" or none") for f in FEATURES if cells[f]}
    return ", ".join(f if limit in ("yes", "any", "1+") else f"{f} ({limit})" for f, limit in limits.items())


COLUMNS = ("backend", "devices", "rows", "head size", "dtype", "cache", "page", "layout", "types", "causal", "features", "state")


def columns(row: MatrixRow) -> tuple[str, ...]:
    """A row's text for each of :data:`COLUMNS`."""
    c = row.cells
    size = c["head_size"] if c["v_head_size"].startswith("=") else f"{c['head_size']} / v {c['v_head_size']}"
    cells = (
        row.backend,
        c["device"],
        c["row_class"],
        size,
        c["dtype"],
        c["kv_dtype"],
        c["page_size"].replace(" or none", " packed") or "packed",
        c["kv_layout"],
    )
    return (*cells, c["attn_type"], c["causal"], features(c), row.state)


def markdown(catalog: Catalog) -> str:
    """The table of ``docs/support.md``."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines.extend("| " + " | ".join(cell.replace("|", "/") for cell in columns(row)) + " |" for row in matrix(catalog))
    return "\n".join(lines) + "\n"


def overview(catalog: Catalog) -> str:
    """The table of the README: a row a backend."""
    lines = ["| backend | what it is | devices | state |", "|---|---|---|---|"]
    for info in catalog.backends.values():
        lines.append(f"| `{info.name}` | {info.summary} | {info.devices().cell()} | {run_state(info)} |")
    return "\n".join(lines) + "\n"

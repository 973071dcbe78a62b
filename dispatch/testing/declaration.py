"""Checks of what a backend declares: names, constraints and their sentences, JSON, and what importing it costs."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator

from attnmux.dispatch import host
from attnmux.dispatch.claims import CLAIM_FIELDS, Claim
from attnmux.dispatch.device import Device, DeviceSet
from attnmux.dispatch.query import Query
from attnmux.dispatch.reasons import CODES
from attnmux.dispatch.registry import GROUP
from attnmux.dispatch.spec import ROW_CLASSES, AttentionSpec, show, spec_from_dict
from attnmux.testing.check import Check, Skip, require
from attnmux.testing.sampling import VALUES, Subject, base_spec, changed, variants

KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_attn_interface", "cutlass", "intel_extension_for_pytorch", "aiter", "helion", "vllm")
"""Modules that no declaration may import: listing and selecting must stay cheap and must not need them."""


def checks(subject: Subject) -> Iterator[Check]:
    """Need no hardware."""
    table = (
        ("summary", "the summary is one line", _summary),
        ("claims-can-be-met", "every claim covers at least one meaningful spec", _claims_can_be_met),
        ("constraints-speak", "every constraint answers, says what it wants and fits a table cell", _constraints_speak),
        ("sentence-equals-check", "a constraint whose table cell is empty accepts nothing", _sentence_equals_check),
        ("reasons-name-values", "a refusal names the value offered and the one wanted", _reasons_name_values),
        ("json", "spec and selection survive JSON", _json),
        ("import-is-light", "importing the declaring module pulls in no kernel library", _import_is_light),
        ("implementation-loads", "the implementation imports and is a Backend", _implementation_loads),
    )
    for name, summary, body in table:
        yield Check(f"declaration/{name}", subject.name, summary, lambda body=body: body(subject))  # type: ignore[misc]


def device_of(claim: Claim) -> Device:
    """A device that a claim names, known by name only."""
    kind, _, arch = claim.device.patterns[0].partition(":")
    return Device(kind, re.split(r"\.\.|[+*]", arch)[0] or "any", "", "")


def _summary(subject: Subject) -> None:
    summary = subject.info.summary
    require(summary and "\n" not in summary, f"summary is {summary!r}, wanted one line")


def _claims_can_be_met(subject: Subject) -> None:
    for number, claim in enumerate(subject.info.claims, 1):
        require(base_spec(claim, device_of(claim)) is not None, f"claim {number}: no combination of the usual values fits it, so it covers nothing")


def _constraints_speak(subject: Subject) -> None:
    for number, claim in enumerate(subject.info.claims, 1):
        hash(claim)
        for field in CLAIM_FIELDS:
            constraint, where = claim.constraint(field), f"claim {number}, {field}"
            wants, cell = constraint.wants(), constraint.cell()
            require(isinstance(wants, str) and wants and "\n" not in wants, f"{where}: wants() is {wants!r}, wanted a phrase")
            require(isinstance(cell, str) and not re.search(r"[\n|]", cell), f"{where}: cell() is {cell!r}, wanted one line without |")
            if isinstance(constraint, DeviceSet):
                continue
            for value, query in _probes(claim, field):
                require(isinstance(constraint.accepts(value, query), bool), f"{where}: accepts({show(value)}) did not answer True or False")


def _sentence_equals_check(subject: Subject) -> None:
    for number, claim in enumerate(subject.info.claims, 1):
        for field in VALUES:
            constraint = claim.constraint(field)
            if constraint.cell():
                continue
            for value, query in _probes(claim, field):
                if value is not None and value is not False:
                    text = f"claim {number}, {field}: the matrix says nothing is accepted, the check accepts {show(value)}"
                    require(not constraint.accepts(value, query), text)


def _reasons_name_values(subject: Subject) -> None:
    for claim in subject.info.claims:
        for field in VALUES:
            for value, query in _probes(claim, field):
                for reason in claim.refusals(query):
                    text = str(reason)
                    require(reason.code in CODES and text, f"{field}={show(value)}: reason without code or text")
                    require(reason.offered in text, f"the reason {text!r} does not name the value offered, {reason.offered}")
                    require(reason.wanted in text or reason.wanted == "no", f"the reason {text!r} does not name what is wanted, {reason.wanted}")


def _json(subject: Subject) -> None:
    for variant in variants(subject):
        require(spec_from_dict(json.loads(json.dumps(variant.spec.to_dict()))) == variant.spec, f"{variant.spec} does not survive JSON")
        found = host.answer(variant.spec, subject.device).to_dict()
        require(json.loads(json.dumps(found))["routes"] == found["routes"], f"the selection of {variant.label} does not survive JSON")
        return
    raise Skip(f"no claim for {subject.device.name}")


def _import_is_light(subject: Subject) -> None:
    if subject.quick:
        raise Skip("left out of quick runs: it starts an interpreter")
    module = _declaring_module(subject.name)
    code = f"import sys, importlib; importlib.import_module({module!r}); print(*(m for m in {KERNEL_LIBRARIES!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", code], capture_output=True, text=True, check=False)
    require(done.returncode == 0, f"importing {module} alone fails: {done.stderr.strip().splitlines()[-1:]}")
    require(not done.stdout.strip(), f"importing {module} imports {done.stdout.strip()}: import it where the backend is loaded")


def _implementation_loads(subject: Subject) -> None:
    if subject.stopped:
        raise Skip(subject.stopped)
    host.registry().load_backend(subject.name)  # raises PluginError with the cause


def _declaring_module(name: str) -> str:
    registry = host.registry()
    record = registry.records[registry.catalog.providers[name]]
    if record.origin == "builtin":
        return record.name
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == record.name and record.origin == "entry point":
            return point.module
    raise Skip(f"plugin {record.name} was registered at run time, no module declares it")


def _probes(claim: Claim, field: str) -> Iterator[tuple[object, Query]]:
    """Values of one field, each with a query that holds it where such a spec exists."""
    device = device_of(claim)
    base = base_spec(claim, device) or AttentionSpec(4, 2, 64, VALUES["dtype"][0])
    if field not in VALUES:
        values: tuple[object, ...] = {"row_class": ROW_CLASSES, "lengths": ("exact", "upper_bound")}.get(field, (1, 2, 7))
        yield from ((value, Query(base, device, base.row_classes[0])) for value in values)
        return
    for value in VALUES[field]:
        spec = changed(base, {field: value})
        for row_class in spec.row_classes if spec is not None else ():
            yield getattr(spec, field), Query(spec, device, row_class)  # type: ignore[arg-type]

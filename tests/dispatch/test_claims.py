"""Constraints and claims: the check, the sentence and the table cell come from one object, for every field of the spec."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fake_plugins import ask, claim, info, platform, registry

from attnmux.dispatch.claims import CLAIM_FIELDS, BackendInfo, Claim, Composition
from attnmux.dispatch.constraints import ANY, OFF, ON, YES_OR_NO, AnyOf, Constraint, Not, OneOf, Range, SameAs
from attnmux.dispatch.device import Device, DeviceSet
from attnmux.dispatch.errors import ConfigError
from attnmux.dispatch.matrix import COLUMNS, columns, markdown, matrix
from attnmux.dispatch.platform import Order, when
from attnmux.dispatch.query import QUERY_FIELDS, Query
from attnmux.dispatch.reasons import CODES, Reason
from attnmux.dispatch.requirements import Package, Program, Setting, Toolchain
from attnmux.dispatch.spec import SPEC_FIELD_NAMES, AttentionSpec

SM90 = Device("cuda", "sm90", "", "")
BASE = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
VALUES: dict[str, dict[str, object]] = {
    "num_q_heads": {"num_q_heads": 8},
    "num_kv_heads": {"num_kv_heads": 1},
    "head_size": {"head_size": 96},
    "dtype": {"dtype": torch.float16},
    "v_head_size": {"v_head_size": 32},
    "scale": {"scale": 0.5},
    "q_dtype": {"q_dtype": torch.float8_e4m3fn},
    "kv_dtype": {"kv_dtype": torch.float8_e5m2},
    "kv_scale": {"kv_scale": "head", "kv_dtype": torch.float8_e4m3fn},
    "page_size": {"page_size": 48},
    "kv_layout": {"kv_layout": "HND"},
    "attn_type": {"attn_type": "encoder_only"},
    "causal": {"causal": "per_sequence"},
    "sliding_window": {"sliding_window": 7},
    "window_right": {"window_right": 3, "sliding_window": 7, "causal": False},
    "chunk": {"chunk": (8, 1)},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": "sqrt"},
    "sinks": {"sinks": True},
    "mm_prefix": {"mm_prefix": "within_window"},
    "rswa_window": {"rswa_window": 9},
    "sparse": {},  # reserved: no spec can have it
    "return_lse": {"return_lse": True},
    "batch_invariant": {"batch_invariant": True},
}
"""Each field at a value that is not its default, with whatever makes it legal."""

FIELDS = [f.name for f in dataclasses.fields(AttentionSpec) if f.init]
OPTIONAL = [name for name in FIELDS if name not in ("num_q_heads", "num_kv_heads", "head_size", "dtype", "scale", "page_size", "sparse")]
"""What a claim must name before it may be asked for."""

EVERYTHING = {
    "v_head_size": ANY,
    "q_dtype": ANY,
    "kv_dtype": ANY,
    "kv_scale": ANY,
    "kv_layout": ANY,
    "attn_type": ANY,
    "causal": ANY,
    **dict.fromkeys(("sliding_window", "window_right", "chunk", "softcap", "alibi", "sinks", "mm_prefix", "rswa_window"), ANY),
    "return_lse": ANY,
    "batch_invariant": ANY,
}


def spec_with(field: str) -> AttentionSpec:
    return AttentionSpec(**{**BASE, **VALUES[field]})  # type: ignore[arg-type]


def query(spec: AttentionSpec | None = None, **fields: object) -> Query:
    spec = spec or AttentionSpec(**{**BASE, **fields})  # type: ignore[arg-type]
    return Query(spec, SM90, "image" if spec.mm_prefix else "prefill")


def test_the_values_cover_every_field() -> None:
    assert list(VALUES) == FIELDS


def test_every_field_of_the_spec_can_be_claimed_and_asked_about() -> None:
    assert CLAIM_FIELDS == QUERY_FIELDS
    assert ("device", "row_class", "lengths", "group", *SPEC_FIELD_NAMES) == QUERY_FIELDS
    assert list(SPEC_FIELD_NAMES) == FIELDS


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "sparse"])
def test_every_field_is_checked_and_named_in_the_reason(field: str) -> None:
    spec = spec_with(field)
    allowed = AttentionSpec(**BASE)  # type: ignore[arg-type]
    only = claim(**{**EVERYTHING, field: OneOf(getattr(allowed, field))})
    [refusal] = [r for r in only.refusals(query(spec)) if r.field == field]
    assert refusal.code == "unsupported"
    assert str(refusal).startswith(f"{field} ")
    assert not any(r.field == field for r in claim(**EVERYTHING).refusals(query(spec)))


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "sparse"])
def test_every_field_is_in_the_description_and_in_explain(field: str) -> None:
    spec = spec_with(field)
    text = {"num_q_heads": "heads=8/", "num_kv_heads": "heads=4/1"}.get(field, f"{field}=")
    assert text in spec.describe()
    refusing = claim(**{**EVERYTHING, field: OneOf(getattr(AttentionSpec(**BASE), field))})  # type: ignore[arg-type]
    made = registry(
        backends=[info("picky", refusing), info("other", claim("cpu"))], platforms=[platform("picky", name="lab_sm90", device="cuda", arch="sm90")]
    )
    selection = ask(made, spec, Device("cuda", "sm90", "", "lab_sm90"))
    assert text in selection.explain()
    asked = selection.classes[query(spec).row_class]
    assert field in {reason.field for reason in asked.rejected["picky"]}


@pytest.mark.parametrize("field", OPTIONAL)
def test_unspecified_means_no(field: str) -> None:
    refusals = Claim(device=DeviceSet("cuda"), head_size=ANY, dtype=ANY, page_size=ANY).refusals(query(spec_with(field)))
    assert field in {refusal.field for refusal in refusals}


def test_upper_bound_lengths_are_not_claimed_unless_said() -> None:
    bounded = Query(AttentionSpec(**BASE), SM90, "decode", "upper_bound")  # type: ignore[arg-type]
    assert [r.field for r in claim().refusals(bounded)] == ["lengths"]
    assert claim(lengths=OneOf("exact", "upper_bound")).refusals(bounded) == ()


@pytest.mark.parametrize("field", CLAIM_FIELDS)
def test_every_field_is_a_cell_of_the_matrix(field: str) -> None:
    constraint: Constraint = DeviceSet("cuda:sm90") if field == "device" else OneOf("x", "y")
    made = registry(backends=[info("one", dataclasses.replace(claim(), **{field: constraint}))])
    [row] = matrix(made.catalog)
    assert row.cells[field] == ("x y" if field == "causal" else constraint.cell()) != ""


def test_a_composition_is_given_as_a_map_or_as_pairs() -> None:
    pairs = Composition("mix", (("prefill", "a"), ("decode", "b")))
    assert Composition("mix", {"prefill": "a", "decode": "b"}) == pairs
    assert hash(pairs)
    assert (pairs.part("decode"), pairs.part("image")) == ("b", None)


def test_the_markdown_matrix_names_features_and_state() -> None:
    features = claim(sliding_window=ANY, alibi=OneOf(None, "linear"), sinks=YES_OR_NO, page_size=Range(16, of=16, optional=True))
    table = markdown(registry(backends=[info("one", features, implementation=None)]).catalog)
    [line] = [line for line in table.splitlines() if line.startswith("| one")]
    assert "sliding_window, alibi (linear), sinks" in line
    assert "16+ %16 packed" in line
    assert "code not in yet" in line
    assert "softcap" not in line


def test_an_optional_number_is_not_called_packed_where_it_is_a_window() -> None:
    table = markdown(registry(backends=[info("one", claim(sliding_window=Range(1, 64, optional=True), softcap=Range(1, optional=True)))]).catalog)
    [line] = [line for line in table.splitlines() if line.startswith("| one")]
    assert "sliding_window (1-64)" in line
    assert "softcap" in line
    assert "packed" not in line


CONSTRAINTS = [
    (ANY, [None, 0, "x"], []),
    (OFF, [None, False], [True, 0, 1, "x"]),
    (ON, [True, 0, 1, "x"], [None, False]),
    (OneOf(1), [1], [True, 2, None, "1"]),
    (OneOf(True), [True], [1, 1.0, False, None]),
    (OneOf(0), [0], [False, None]),
    (OneOf(None, "linear"), [None, "linear"], ["sqrt", False]),
    (YES_OR_NO, [True, False], [0, 1, None]),
    (Range(64, 256, of=32), [64, 96, 256], [32, 65, 288, None, True, "64", (64, 0), torch.float16]),
    (Range(optional=True), [None, 1, 10**6], [0, -1]),
    (SameAs("head_size"), [64], [32, None]),
    (AnyOf(OFF, OneOf("a")), [None, "a"], ["b", True]),
    (Not(Range(64, of=32)), [63, 80, None], [64, 96]),
    (DeviceSet("cuda:sm80+"), [SM90], [Device("cpu", "x86_64", "", "")]),
]


@pytest.mark.parametrize(("constraint", "inside", "outside"), CONSTRAINTS, ids=[repr(c) for c, _, _ in CONSTRAINTS])
def test_constraints_accept_what_they_say(constraint: Constraint, inside: list[object], outside: list[object]) -> None:
    asked = query()
    assert all(constraint.accepts(value, asked) for value in inside)
    assert not any(constraint.accepts(value, asked) for value in outside)
    assert isinstance(constraint, Constraint)
    assert constraint.wants()
    assert hash(constraint) == hash(constraint)
    assert constraint.cell() or constraint == OFF or not set(inside) - {None, False}


def test_one_is_not_true() -> None:
    assert OneOf(1) != OneOf(True)
    assert len({OneOf(1), OneOf(True), OneOf(1, 2)}) == 3


def test_sentences_say_value_and_limit() -> None:
    limited = claim(head_size=OneOf(64, 128, 256), page_size=Range(16, 256, of=16), softcap=OFF, kv_dtype=SameAs("dtype"))
    asked = query(head_size=80, page_size=8, softcap=30.0, kv_dtype=torch.float8_e4m3fn)
    assert [str(r) for r in limited.refusals(asked)] == [
        "head_size 80: takes 64, 128 or 256",
        "kv_dtype fp8_e4m3fn: takes the same as dtype",
        "page_size 8: takes 16 to 256 in steps of 16",
        "softcap 30.0: not supported",
    ]


def test_the_nearest_claim_speaks() -> None:
    far = claim(head_size=OneOf(128), dtype=OneOf(torch.float16), page_size=OneOf(256))
    near = claim(head_size=OneOf(128), dtype=OneOf(torch.bfloat16))
    for claims in ((far, near), (near, far)):
        covering, reasons = info("two", *claims).judge(query(), None)
        assert covering is None
        assert [r.field for r in reasons] == ["head_size"]


def test_a_claim_for_this_row_class_is_nearer_than_one_for_another() -> None:
    elsewhere = claim(row_class=OneOf("decode"))
    here = claim(row_class=OneOf("prefill"), head_size=OneOf(128), dtype=OneOf(torch.float16))
    _, reasons = info("two", elsewhere, here).judge(query(), None)
    assert [r.field for r in reasons] == ["head_size", "dtype"]


def test_a_claim_for_another_device_is_never_the_nearest() -> None:
    elsewhere = claim("cuda:sm100")
    here = claim("cuda:sm90", head_size=OneOf(128), dtype=OneOf(torch.float16), row_class=OneOf("decode"))
    _, reasons = info("two", elsewhere, here).judge(query(), None)
    assert [r.code for r in reasons] == ["row-class", "unsupported", "unsupported"]


def test_a_backend_without_claims_for_the_device_says_only_that() -> None:
    _, reasons = info("two", claim("cpu", head_size=OneOf(1)), claim("rocm:gfx942")).judge(query(), None)
    assert [str(r) for r in reasons] == ["device cuda:sm90: takes cpu or rocm:gfx942"]


def test_what_a_claim_requires_counts_on_a_real_machine_only() -> None:
    needs = Package("acme-attn", ">=2")
    backend = info("acme", claim(requires=(needs,)), claim(head_size=OneOf(128), dtype=OneOf(torch.float16)))
    assert backend.judge(query(), None)[0] is backend.claims[0]
    covering, reasons = backend.judge(query(), Toolchain({needs: "1.9"}))
    assert covering is None
    assert [str(r) for r in reasons] == ["needs acme-attn>=2: 1.9 is installed"]
    assert backend.judge(query(), Toolchain({needs: "2.1rc1"}))[0] is backend.claims[0]
    assert backend.requirements() == (needs,)


def test_requirements_judge_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SETTING", "0")
    requirements = (Package("pytest"), Package("no-such-distribution", also=("pytest",)), Package("no-such-distribution"))
    found = Toolchain.of((*requirements, Program("no-such-program", "build it"), Setting("FAKE_SETTING", "1"), Setting("FAKE_UNSET", "1")))
    assert found.unmet(requirements[:2]) == ()
    assert [(str(r), r.todo) for r in found.unmet(found.found)] == [
        ("needs no-such-distribution: not installed", "pip install 'no-such-distribution'"),
        ("needs the program no-such-program: not on the path", "build it"),
        ("needs FAKE_SETTING=1: it is '0'", "export FAKE_SETTING=1"),
        ("needs FAKE_UNSET=1: it is not set", "export FAKE_UNSET=1"),
    ]


@pytest.mark.parametrize("code", CODES)
def test_every_reason_code_has_a_sentence_of_its_own(code: str) -> None:
    text = str(Reason(code, "field", "offered", "wanted"))
    assert text
    others = {str(Reason(other, "field", "offered", "wanted")) for other in CODES if other != code}
    assert text not in others or code in ("unsupported", "device", "row-class", "package", "tool", "setting")
    assert Reason(code, "field", "offered", "wanted").to_dict()["text"] == text


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown reason code 'typo': known: unsupported"):
        Reason("typo", "f", "o", "w")


BROKEN = {
    "a bare value in a claim": (lambda: claim(head_size=128), TypeError, "head_size of a claim is 128, wanted a constraint, such as OneOf"),
    "requires that is no tuple": (lambda: claim(requires=Package("x")), TypeError, "requires of a claim"),
    "a requirement by name": (lambda: info("x", requires=("torch",)), TypeError, "requires of backend 'x'.*tuple of requirements"),
    "no claims": (lambda: BackendInfo(name="x", summary="", claims=(), implementation=None), TypeError, "claims of backend 'x'.*one or more Claims"),
    "one claim, no tuple": (lambda: BackendInfo(name="x", summary="", claims=claim(), implementation=None), TypeError, "claims of backend 'x'"),  # type: ignore[arg-type]
    "a name with a capital": (lambda: info("Acme"), ValueError, "the name of a backend is 'Acme', wanted lower-case"),
    "a name with a comma": (lambda: info("a,b"), ValueError, "the name of a backend is 'a,b'"),
    "an implementation without a class": (
        lambda: info("x", implementation="pkg.mod"),
        ValueError,
        "implementation of backend 'x'.*'package.module:Class'",
    ),
    "graphs of an unknown class": (lambda: info("x", graphs=("decod",)), ValueError, "graphs of backend 'x' holds 'decod': did you mean 'decode'"),
    "no parts": (lambda: Composition("mix", ()), ValueError, "parts of composition 'mix'"),
    "parts of an unknown class": (lambda: Composition("mix", (("decod", "x"),)), ValueError, "parts of composition 'mix'"),  # type: ignore[arg-type]
    "a map of an unknown class": (lambda: Composition("mix", {"decod": "x"}), ValueError, "parts of composition 'mix'"),  # type: ignore[dict-item]
    "a class twice": (lambda: Composition("mix", (("decode", "x"), ("decode", "y"))), ValueError, "parts of composition 'mix'"),
    "OneOf of nothing": (OneOf, ValueError, "OneOf needs at least one value"),
    "AnyOf of nothing": (AnyOf, ValueError, "AnyOf needs at least one constraint"),
    "SameAs of no field": (lambda: SameAs("head_sise"), ValueError, "SameAs names the field 'head_sise': did you mean 'head_size'"),
    "a set of no devices": (DeviceSet, ConfigError, "at least one pattern"),
    "an unknown field in a condition": (
        lambda: when(head_sise=ANY),
        ConfigError,
        "unknown field 'head_sise' in a condition: did you mean 'head_size'",
    ),
    "an unknown class in a condition": (lambda: when(row_class="decod"), ConfigError, "unknown row class 'decod': did you mean 'decode'"),
    "a device that is no pattern": (lambda: when(90), ConfigError, "device of a condition is 90"),  # type: ignore[arg-type]
    "an order that is one name": (lambda: Order("triton", "why"), ConfigError, "names of an order are 'triton', wanted a tuple"),  # type: ignore[arg-type]
    "a band upside down": (lambda: Order(("a",), "why", q_len=(5, 1)), ConfigError, r"q_len of an order is \(5, 1\)"),
    "a band from below zero": (lambda: Order(("a",), "why", kv_len=(-1, None)), ConfigError, r"kv_len of an order is \(-1, None\)"),
    "a band of booleans": (lambda: Order(("a",), "why", kv_len=(False, True)), ConfigError, "kv_len of an order"),
    "an open lower end": (lambda: Order(("a",), "why", kv_len=(None, 4)), ConfigError, "kv_len of an order"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_declaration_that_would_fail_later_is_refused_when_made(what: str) -> None:
    make, error, message = BROKEN[what]
    with pytest.raises(error, match=message):
        make()


PATTERNS = [
    ("cuda", ["cuda:sm75", "cuda:sm120"], ["rocm:gfx942", "cpu:x86_64"]),
    ("cuda:sm90", ["cuda:sm90"], ["cuda:sm89", "cuda:sm100"]),
    ("cuda:sm_90a", ["cuda:sm90"], ["cuda:sm100"]),
    ("cuda:sm80..sm89", ["cuda:sm80", "cuda:sm86", "cuda:sm89"], ["cuda:sm75", "cuda:sm90"]),
    ("cuda:sm80+", ["cuda:sm80", "cuda:sm150"], ["cuda:sm75"]),
    ("cuda:sm8*", ["cuda:sm80", "cuda:sm89"], ["cuda:sm90"]),
    ("rocm:gfx9*", ["rocm:gfx90a", "rocm:gfx942"], ["rocm:gfx1100", "cuda:sm90"]),
    ("rocm:gfx942", ["rocm:gfx942"], ["rocm:gfx950"]),
    ("xpu", ["xpu:xe2"], ["cpu:x86_64"]),
    ("cpu:x86_64", ["cpu:x86_64"], ["cpu:aarch64"]),
]


@pytest.mark.parametrize(("pattern", "inside", "outside"), PATTERNS)
def test_device_patterns(pattern: str, inside: list[str], outside: list[str]) -> None:
    devices = DeviceSet(pattern)
    assert all(Device(*name.split(":"), "", "") in devices for name in inside)
    assert not any(Device(*name.split(":"), "", "") in devices for name in outside)


@pytest.mark.parametrize(
    "pattern",
    ["", "gpu", "cuda:", "cuda:sm", "cuda:hopper", "cuda:sm9x", "rocm:mi300", "rocm:gfx9..gfx94", "cuda:sm90..sm80", "cuda:sm80..", "xpu:sm90"],
)
def test_device_patterns_that_could_never_match_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="device pattern"):
        DeviceSet(pattern)


@pytest.mark.parametrize(
    ("fields", "column", "text"),
    [
        ({"causal": OneOf(False)}, "causal", "no"),
        ({"causal": OneOf(True, False, "per_sequence")}, "causal", "yes no per_sequence"),
        ({"page_size": OFF}, "page", "packed"),
        ({"page_size": Range(16, optional=True)}, "page", "16+ packed"),
        ({"v_head_size": OneOf(128)}, "head size", "any / v 128"),
    ],
)
def test_columns_of_the_matrix(fields: dict[str, Constraint], column: str, text: str) -> None:
    [row] = matrix(registry(backends=[info("one", claim(**fields))]).catalog)
    assert dict(zip(COLUMNS, columns(row), strict=True))[column] == text

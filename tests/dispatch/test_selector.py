"""The selector as a pure function: orders, wishes, compositions, insertions, bands, dry runs, and what it says about all of them."""

from __future__ import annotations

import ast
import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import ask, claim, info, lab, platform, plugin, registry

import attnmux
from attnmux.dispatch import selector as selector_module
from attnmux.dispatch.claims import BackendInfo, Composition
from attnmux.dispatch.constraints import ANY, ON, AnyOf, OneOf, Range
from attnmux.dispatch.device import Device
from attnmux.dispatch.errors import ConfigError, NoBackendError
from attnmux.dispatch.platform import Insertion, Order, when
from attnmux.dispatch.reasons import CODES
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.requirements import Package, Program, Setting, Toolchain
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import AttentionSpec, RowClass
from attnmux.dispatch.steering import steer

SPANS = {"mm_prefix": ANY}
MIX = Composition("mix", (("image", "a"), ("prefill", "b"), ("decode", "b")))


def with_backends(*names: str, order: str | Sequence[Order] = "a>b>c", extra: Sequence[BackendInfo] = (), **declarations: Any) -> Registry:
    orders = (order,) if isinstance(order, str) else order
    backends = [*(info(name, claim(**SPANS)) for name in names), *extra]
    return registry(platforms=[lab(*orders), platform(*orders, name="lab_sm90", device="cuda", arch="sm90")], backends=backends, **declarations)


def argument(**verbs: Any) -> Any:
    return steer("argument", **verbs)


def ranked(selection: Selection, row_class: RowClass = "decode") -> list[str]:
    return list(selection.classes[row_class].ranked)


def test_the_order_decides_and_every_candidate_has_a_verdict(spec: AttentionSpec, cpu: Device) -> None:
    refusing = info("a", claim(head_size=OneOf(64)))
    selection = ask(with_backends("b", "c", "d", extra=[refusing]), spec, cpu)
    assert selection.routes == {"prefill": "b", "decode": "b"}
    assert selection.name == "b"
    assert selection.complete
    verdicts = [(c.name, c.rank, c.status, [str(r) for r in c.reasons], c.origin) for c in selection.classes["decode"].candidates]
    assert verdicts == [
        ("a", 1, "rejected", ["head_size 16: takes 64"], "platform lab_cpu"),
        ("b", 2, "selected", [], "platform lab_cpu"),
        ("c", 3, "eligible", [], "platform lab_cpu"),
        ("d", None, "rejected", ["in no order for this device: prefer or require it by name"], ""),
    ]
    assert selection.rejected == {c.name: c.reasons for c in selection.classes["decode"].candidates if c.reasons}
    assert selection.classes["decode"].default.order.reason == "the lab's order"


def test_only_classes_that_the_spec_can_produce(cpu: Device) -> None:
    made = with_backends("a", extra=[info("e", claim(attn_type=ANY, causal=ANY))], order="a>e")
    plain = {"num_q_heads": 1, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    assert list(ask(made, AttentionSpec(**plain, mm_prefix="within_window"), cpu).routes) == ["image", "prefill", "decode"]  # type: ignore[arg-type]
    assert list(ask(made, AttentionSpec(**plain, attn_type="encoder_only"), cpu).routes) == ["prefill"]  # type: ignore[arg-type]
    assert list(ask(made, AttentionSpec(**plain, attn_type="cross"), cpu).routes) == ["prefill", "decode"]  # type: ignore[arg-type]


def test_the_first_order_whose_condition_holds_decides(spec: AttentionSpec, cpu: Device) -> None:
    orders = [
        Order(("c",), "elsewhere", when("cuda:sm90+")),
        Order(("b", "a"), "decode wants b", when(row_class="decode")),
        Order(("c", "a"), "small heads", when(head_size=Range(1, 16))),
        Order(("a",), "the rest"),
    ]
    made = with_backends("a", "b", "c", order=orders)
    assert ask(made, spec, cpu).routes == {"prefill": "c", "decode": "b"}
    assert ask(made, spec.replace(head_size=32), cpu).routes == {"prefill": "a", "decode": "b"}
    without = with_backends("a", "b", "c", order=orders[2:])
    assert ask(without, spec, cpu).routes == {"prefill": "c", "decode": "c"}


@pytest.mark.parametrize(
    ("verbs", "prefill", "decode"),
    [
        ({}, ["a", "b", "c"], ["a", "b", "c"]),
        ({"prefer": "b"}, ["b", "a", "c"], ["b", "a", "c"]),
        ({"prefer": ["c", "b"]}, ["c", "b", "a"], ["c", "b", "a"]),
        ({"prefer": {"decode": "d"}}, ["a", "b", "c"], ["d", "a", "b", "c"]),
        ({"prefer": "d"}, ["d", "a", "b", "c"], ["d", "a", "b", "c"]),
        ({"require": "c"}, ["c"], ["c"]),
        ({"require": "d"}, ["d"], ["d"]),
        ({"require": {"decode": "b"}}, ["a", "b", "c"], ["b"]),
        ({"require": ["c", "b"]}, ["c", "b"], ["c", "b"]),
        ({"require": ["c", "b"], "prefer": "b"}, ["b", "c"], ["b", "c"]),
        ({"deny": "a"}, ["b", "c"], ["b", "c"]),
        ({"deny": {"prefill": ["a", "b"]}}, ["c"], ["a", "b", "c"]),
        ({"order": "c>a"}, ["c", "a", "b"], ["c", "a", "b"]),
        ({"order": ["d"]}, ["d", "a", "b", "c"], ["d", "a", "b", "c"]),
        ({"order": [Order(("b",), "mine", when(row_class="decode"))]}, ["a", "b", "c"], ["b", "a", "c"]),
        ({"order": "b>a", "prefer": "c", "deny": "b"}, ["c", "a"], ["c", "a"]),
    ],
    ids=str,
)
def test_verbs(verbs: dict[str, Any], prefill: list[str], decode: list[str], spec: AttentionSpec, cpu: Device) -> None:
    selection = ask(with_backends("a", "b", "c", "d"), spec, cpu, argument(**verbs))
    assert ranked(selection, "prefill") == prefill
    assert ranked(selection, "decode") == decode


def test_a_preference_that_cannot_run_is_noted_and_passed_over(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", extra=[info("picky", claim(head_size=OneOf(64)))])
    selection = ask(made, spec, cpu, argument(prefer="picky"))
    assert selection.routes["decode"] == "a"
    note = "prefer picky (argument) was not followed for decode: head_size 16: takes 64"
    assert selection.classes["decode"].notes == (note,)
    assert note in selection.explain()


def test_a_requirement_that_cannot_run_leaves_the_class_empty_with_every_reason(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", "b", extra=[info("picky", claim(head_size=OneOf(64)))], order="a>b")
    selection = ask(made, spec, cpu, argument(require="picky"))
    assert not selection.complete
    assert selection.routes == {}
    assert selection.name == "none"
    assert {name: [str(r) for r in reasons] for name, reasons in selection.rejected.items()} == {
        "picky": ["head_size 16: takes 64"],
        "a": ["argument requires picky"],
        "b": ["argument requires picky"],
    }


def test_a_denial_names_its_sources(spec: AttentionSpec, cpu: Device) -> None:
    selection = ask(with_backends("a", "b"), spec, cpu, argument(deny="a"), steer("environment", deny="a"))
    [reason] = selection.rejected["a"]
    assert str(reason) == "denied by deny (argument, environment)"
    assert reason.todo == "remove a from deny (argument, environment)"


def test_require_against_deny_raises_and_names_both(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", "b", compositions=[MIX])
    for require, deny, text in [
        ("a", "a", "'a' is required by argument and denied by file x: drop one of them"),
        ({"decode": "a"}, "a", "'a' is required by argument and denied by file x"),
        ("a", {"prefill": "a"}, "'a' is required by argument and denied by file x"),
        ("mix", {"decode": "b"}, "'b', a part of 'mix', is required by argument and denied by file x"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(text)):
            ask(made, spec, cpu, argument(require=require), steer("file x", deny=deny))
    for require, deny in [({"decode": "a"}, {"prefill": "a"}), ("mix", {"image": "b"}), ("a", "b")]:
        ask(made, spec, cpu, argument(require=require), steer("file x", deny=deny))


def test_a_composition_stands_for_its_parts(spec: AttentionSpec, cpu: Device) -> None:
    spans = spec.replace(mm_prefix="override_window")
    made = with_backends("a", "b", "c", order="mix>c", compositions=[MIX])
    selection = ask(made, spans, cpu)
    assert selection.routes == {"image": "a", "prefill": "b", "decode": "b"}
    assert selection.name == "mix"
    assert ranked(selection, "image") == ["a", "c"]
    assert selection.classes["image"].candidates[0].origin == "mix, platform lab_cpu"
    assert ask(made, spec, cpu).name == "b"


def test_a_part_that_cannot_run_gives_way_for_its_class_alone(spec: AttentionSpec, cpu: Device) -> None:
    spans = spec.replace(mm_prefix="override_window")
    made = with_backends("a", "c", order="mix>c", compositions=[MIX], extra=[info("b", claim(row_class=OneOf("decode")))])
    selection = ask(made, spans, cpu)
    assert selection.routes == {"image": "a", "prefill": "c", "decode": "b"}
    assert selection.name == "a+c+b"


@pytest.mark.parametrize("verb", ["prefer", "require", "order"])
def test_compositions_can_be_named_in_wishes(verb: str, spec: AttentionSpec, cpu: Device) -> None:
    spans = spec.replace(mm_prefix="override_window")
    selection = ask(
        with_backends("a", "b", "c", order="c", compositions=[MIX]), spans, cpu, argument(**{verb: "mix" if verb != "order" else ["mix"]})
    )
    assert selection.name == "mix"


def test_a_required_composition_without_a_part_for_a_class_leaves_it_empty(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", compositions=[Composition("half", (("decode", "a"),))])
    selection = ask(made, spec, cpu, argument(require="half"))
    assert selection.routes == {"decode": "a"}
    assert [str(r) for r in selection.classes["prefill"].rejected["a"]] == ["argument requires half"]


def test_a_composition_cannot_be_denied(spec: AttentionSpec, cpu: Device) -> None:
    with pytest.raises(ConfigError, match=re.escape("deny (argument): 'mix' is a composition, wanted a backend; its parts are a, b")):
        ask(with_backends("a", "b", compositions=[MIX]), spec, cpu, argument(deny="mix"))


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [(("prefill", "decode"), (), "a"), (("prefill",), ("decode",), "a+b"), (("decode",), ("prefill",), "swap"), (("decode",), (), "a")],
)
def test_names_of_mixes(a: tuple[str, ...], b: tuple[str, ...], name: str, spec: AttentionSpec, cpu: Device) -> None:
    backends = [info(n, claim(row_class=OneOf(*classes))) for n, classes in (("a", a), ("b", b)) if classes]
    made = registry(platforms=[lab("a>b")], backends=backends, compositions=[Composition("swap", (("prefill", "b"), ("decode", "a")))])
    selection = ask(made, spec, cpu)
    assert selection.name == name
    assert selection.complete == (len(a) + len(b) == 2)


def test_an_order_may_name_what_no_plugin_provides(spec: AttentionSpec, cpu: Device) -> None:
    selection = ask(with_backends("b", order="ghost>b"), spec, cpu)
    assert selection.routes["decode"] == "b"
    assert str(selection.rejected["ghost"][0]) == "no active plugin provides it"


def test_without_an_order_nothing_is_chosen_but_a_preference_is(spec: AttentionSpec, cpu: Device) -> None:
    made = registry(platforms=[lab(Order(("a",), "spans", when(mm_prefix=ON)))], backends=[info("a")])
    selection = ask(made, spec, cpu)
    assert not selection.complete
    assert [r.code for r in selection.rejected["a"]] == ["not-ordered"]
    assert selection.classes["decode"].hints == ('prefer={"decode": "a"} would run a, which no order names',)
    assert ask(made, spec, cpu, argument(prefer={"decode": "a"})).routes == {"decode": "a"}


@pytest.mark.parametrize(
    ("before", "expected"),
    [("b", ["a", "x", "b", "c"]), ("*", ["x", "a", "b", "c"]), (None, ["a", "b", "c", "x"]), ("absent", ["a", "b", "c"]), ("x", ["a", "b", "c"])],
)
def test_insertions(before: str | None, expected: list[str], spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", "b", "c", "x", orders=[Insertion("x", "measured", before=before)])
    selection = ask(made, spec, cpu)
    assert ranked(selection) == expected
    assert ("x placed by plugin fake0: measured" in selection.explain()) == ("x" in expected)


def test_an_insertion_moves_an_entry_and_keeps_to_its_condition(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", "b", "c", orders=[Insertion("c", "measured", before="*", when=when("cpu", row_class="decode"))])
    assert ranked(ask(made, spec, cpu)) == ["c", "a", "b"]
    assert ranked(ask(made, spec, cpu), "prefill") == ["a", "b", "c"]
    assert ranked(ask(made, spec, cpu, argument(order="b"))) == ["b", "c", "a"]


def test_insertions_apply_in_the_order_of_plugin_names(spec: AttentionSpec, cpu: Device) -> None:
    base = plugin(platforms=[lab("a")], backends=[info(n) for n in ("a", "x", "y")])
    first, second = (plugin(orders=[Insertion(n, "first!", before="*")]) for n in ("x", "y"))
    for order in ((first, second), (second, first)):
        made = registry(base)
        for each in order:
            made.register(each, "p1" if each is first else "p2")
        assert ranked(ask(made, spec, cpu)) == ["y", "x", "a"]


def test_adding_a_backend_changes_no_answer_except_where_it_rightly_wins(spec: AttentionSpec, cpu: Device) -> None:
    specs = [spec, spec.replace(head_size=64), spec.replace(mm_prefix="within_window"), spec.replace(sinks=True)]
    made = with_backends("a", "b")
    before = [ask(made, s, cpu).routes for s in specs]
    made.register(plugin(backends=[info("new", claim(head_size=OneOf(64), **SPANS))]), "newcomer")
    assert [ask(made, s, cpu).routes for s in specs] == before
    made.register(plugin(orders=[Insertion("new", "measured", before="*", when=when(row_class="decode"))]), "placed")
    after = [ask(made, s, cpu).routes for s in specs]
    assert after == [before[0], {**before[1], "decode": "new"}, *before[2:]]
    made.unregister("placed")
    made.unregister("newcomer")
    assert [ask(made, s, cpu).routes for s in specs] == before


BANDS = [
    Order(("b",), "a few tokens over short contexts", when(row_class="decode"), q_len=(2, 4), kv_len=(0, 1024)),
    Order(("c",), "long contexts", kv_len=(4096, None)),
    Order(("a", "b", "c"), "the rest"),
]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "backend"),
    [(1, 1, "a"), (2, 0, "b"), (2, 1024, "b"), (2, 1025, "a"), (4, 1024, "b"), (5, 1024, "a"), (2, 4095, "a"), (2, 4096, "c"), (16, 10**6, "c")],
)
def test_bands_route_rows_by_their_lengths(q_len: int, kv_len: int, backend: str, spec: AttentionSpec, cpu: Device) -> None:
    for selection in (
        ask(with_backends("a", "b", "c", order=BANDS), spec, cpu),
        ask(with_backends("a", "b", "c"), spec, cpu, argument(order=BANDS)),
    ):
        decode = selection.classes["decode"]
        assert decode.route(q_len, kv_len) == backend
        assert decode.backend == "a"
        assert decode.backends == ("a", "b", "c")
        assert selection.classes["prefill"].backends == ("a", "c")


def test_bands_are_in_the_name_in_graphs_and_in_explain(spec: AttentionSpec, sm90: Device) -> None:
    backends = [info(n, claim(), graphs=("prefill", "decode") if n != "c" else ()) for n in "abc"]
    made = registry(platforms=[platform(*BANDS, name="lab_sm90", device="cuda", arch="sm90")], backends=backends)
    selection = ask(made, spec, sm90)
    assert selection.name == "a+c+b"
    assert selection.backends == ("a", "c", "b")
    assert selection.graphs == {"prefill": ("c",), "decode": ("c",)}
    text = selection.explain()
    assert "decode   a, q_len 2-4 kv_len 0-1024: b, kv_len 4096+: c" in text
    assert "decode q_len 2-4 kv_len 0-1024: platform lab_sm90 [decode rows]: a few tokens over short contexts" in text
    assert selection.to_dict()["classes"]["decode"]["bands"][0]["q_len"] == (2, 4)


def test_a_band_whose_first_choice_cannot_run_falls_to_what_stands_below(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("b", extra=[info("a", claim(head_size=OneOf(64)))], order=[Order(("a",), "short", kv_len=(0, 9)), Order(("b",), "rest")])
    selection = ask(made, spec, cpu)
    assert selection.classes["decode"].route(1, 5) == "b"
    assert selection.complete


def test_a_band_without_a_backend_makes_the_answer_incomplete(spec: AttentionSpec, cpu: Device) -> None:
    order = [Order(("b",), "short", kv_len=(0, 9))]
    selection = ask(with_backends("b", order=order), spec, cpu)
    assert selection.classes["decode"].route(1, 5) == "b"
    assert selection.classes["decode"].route(1, 10) is None
    assert not selection.complete


def test_graphs_of_a_composite_are_as_able_as_its_least_able_route(spec: AttentionSpec, sm90: Device) -> None:
    backends = [
        info("a", claim(row_class=OneOf("image"), **SPANS), graphs=("image", "decode")),
        info("b", claim(row_class=OneOf("prefill", "decode"), **SPANS), graphs=("decode",)),
    ]
    made = registry(platforms=[platform("mix", name="lab_sm90", device="cuda", arch="sm90")], backends=backends, compositions=[MIX])
    selection = ask(made, spec.replace(mm_prefix="override_window"), sm90)
    assert selection.graphs == {"image": (), "prefill": ("b",), "decode": ()}
    assert "graphs  image, decode rows can be captured" in selection.explain()
    assert "prefill rows cannot: b is not capturable" in selection.explain()


NEEDS = Package("acme-attn", ">=2")


def test_what_is_absent_is_a_note_in_a_dry_run_and_a_reason_on_a_real_machine(spec: AttentionSpec, cpu: Device, sm90: Device) -> None:
    backends = [
        info("a", requires=(NEEDS,)),
        info("b", claim(requires=(NEEDS,))),
        info("c", implementation=None),
        info("d"),
    ]
    made = registry(platforms=[lab("a>b>c>d"), platform("a>b>c>d", name="lab_sm90", device="cuda", arch="sm90")], backends=backends)
    made.catalog.broken["d"] = "ImportError: no"
    missing, unwritten, failing = (
        "needs acme-attn>=2: not installed",
        "declared, its code is not in this version yet",
        "failed to load: ImportError: no",
    )
    dry = ask(made, spec, sm90, toolchain=Toolchain({NEEDS: None})).classes["decode"]
    assert [(c.name, c.status, c.notes) for c in dry.candidates] == [
        ("a", "selected", (missing,)),
        ("b", "eligible", (missing,)),
        ("c", "eligible", (unwritten,)),
        ("d", "eligible", (failing,)),
    ]
    real = ask(made, spec, cpu, toolchain=Toolchain({NEEDS: None})).classes["decode"]
    assert {n: [(r.code, str(r)) for r in reasons] for n, reasons in real.rejected.items()} == {
        "a": [("package", missing)],
        "b": [("package", missing)],
        "c": [("not-in-yet", unwritten)],
        "d": [("load-failed", failing)],
    }
    assert not any(c.notes for c in real.candidates)
    assert ask(made, spec, cpu, toolchain=Toolchain({NEEDS: "2.1"})).classes["decode"].ranked == ("a", "b")


def test_upper_bound_lengths_are_a_question_of_their_own(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", extra=[info("b", claim(lengths=OneOf("exact", "upper_bound")))])
    assert ask(made, spec, cpu).name == "a"
    bounded = ask(made, spec, cpu, lengths="upper_bound")
    assert bounded.name == "b"
    assert [str(r) for r in bounded.rejected["a"]] == ["lengths upper_bound: takes exact"]


def layouts_in(hint: str) -> list[dict[str, Any]]:
    """The changes that ``would run with kv_layout NHD and page_size 16 64; kv_layout HND and page_size 16`` promises."""
    found = re.findall(r"kv_layout (\w+) and page_size ([\d ]+)", hint)
    return [{"kv_layout": layout, "page_size": int(size)} for layout, sizes in found for size in sizes.split()]


def test_layout_hints_name_exactly_the_layouts_at_which_the_answer_changes(spec: AttentionSpec, cpu: Device) -> None:
    backends = [
        info("a", claim(page_size=Range(64, of=64), kv_layout=OneOf("HND"))),
        info("b", claim(page_size=Range(32, of=32))),
        info("c"),
    ]
    made = registry(platforms=[lab("a>b>c")], backends=backends)
    decode = ask(made, spec, cpu).classes["decode"]
    assert decode.backend == "c"
    hints = {h.split(" ")[0]: h for h in decode.hints}
    assert hints["a"] == "a (choice 1) would run with kv_layout HND and page_size 64 128 256"
    assert hints["b"] == "b (choice 2) would run with kv_layout NHD and page_size 32 64 128 256; kv_layout HND and page_size 32"
    for name in ("a", "b"):
        for layout in ("NHD", "HND"):
            for page_size in (1, 8, 16, 32, 64, 128, 256):
                changed = spec.replace(kv_layout=layout, page_size=page_size)
                promised = {"kv_layout": layout, "page_size": page_size} in layouts_in(hints[name])
                assert (ask(made, changed, cpu).routes["decode"] == name) == promised


def test_layout_hints_follow_orders_that_speak_of_layouts(spec: AttentionSpec, cpu: Device) -> None:
    orders = [Order(("b",), "big pages", when(page_size=Range(64))), Order(("a", "b"), "the rest")]
    backends = [info("a", claim(page_size=Range(16, of=16))), info("b")]
    [hint, *_] = ask(registry(platforms=[lab(*orders)], backends=backends), spec, cpu).classes["decode"].hints
    assert hint == "a (choice 1) would run with kv_layout NHD and page_size 16 32; kv_layout HND and page_size 16 32"


def test_packed_keys_get_no_layout_hints(spec: AttentionSpec, cpu: Device) -> None:
    backends = [info("a", claim(page_size=Range(16))), info("b")]
    decode = ask(registry(platforms=[lab("a>b")], backends=backends), spec.replace(page_size=None), cpu).classes["decode"]
    assert decode.backend == "b"
    assert decode.hints == ()


def test_the_runner_up_hint_keeps_its_promise(spec: AttentionSpec, cpu: Device) -> None:
    for verbs in ({}, {"require": ["b", "c"]}, {"prefer": "b"}, {"order": BANDS}):
        made = with_backends("a", "b", "c")
        decode = ask(made, spec, cpu, steer("environment", **verbs)).classes["decode"]
        [hint] = decode.hints
        promise = re.fullmatch(r"prefer=(\{.*\}) would run (\w), which can too", hint)
        assert promise
        assert promise[2] != decode.backend
        again = ask(made, spec, cpu, argument(prefer=ast.literal_eval(promise[1])), steer("environment", **verbs)).classes["decode"]
        assert again.backend == promise[2]


def test_what_to_do_is_said_for_the_first_that_would_profit(spec: AttentionSpec, cpu: Device) -> None:
    backends = [
        info("a", requires=(NEEDS,)),
        info("b", requires=(NEEDS,)),
        info("c", claim(head_size=OneOf(64)), requires=(NEEDS,)),
        info("d", claim(softcap=OneOf(1.0))),
        info("e", claim(softcap=OneOf(2.0))),
        info("f"),
    ]
    made = registry(platforms=[lab("a>b>c>d>e>f")], backends=backends)
    decode = ask(made, spec, cpu, argument(deny="a"), toolchain=Toolchain({NEEDS: None})).classes["decode"]
    assert decode.hints == (
        "a (choice 1) would run after: remove a from deny (argument); pip install 'acme-attn>=2'",
        "b (choice 2) would run after: pip install 'acme-attn>=2'",
        "d (choice 4) would run but for softcap none",
    )
    assert ask(made, spec, cpu, toolchain=Toolchain({NEEDS: "2"})).routes["decode"] == "a"
    assert ask(made, spec, cpu, argument(deny="a"), toolchain=Toolchain({NEEDS: "2"})).routes["decode"] == "b"
    assert ask(made, spec.replace(softcap=1.0), cpu, toolchain=Toolchain({NEEDS: None})).routes["decode"] == "d"


def test_dropping_a_requirement_is_said_with_all_sources_that_require(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", "b", extra=[info("z", claim(head_size=OneOf(64)))])
    higher, lower = argument(require="z"), steer("environment", require="b")
    decode = ask(made, spec, cpu, higher, lower).classes["decode"]
    assert decode.hints == (
        "z (choice 1) would run but for head_size 16",
        "a (choice 2) would run after: drop require (argument, environment)",
    )
    assert ask(made, spec, cpu, lower).routes["decode"] == "b"
    assert ask(made, spec, cpu).routes["decode"] == "a"


def test_same_inputs_same_outputs_and_no_look_around(spec: AttentionSpec, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_backends("a", "b", "c", extra=[info("d", requires=(NEEDS,))], orders=[Insertion("d", "why", before="b")], order=BANDS)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the selector looked around")

    for name in (
        "os.getenv",
        "os.environ.get",
        "shutil.which",
        "importlib.metadata.version",
        "builtins.open",
        "time.time",
        "importlib.import_module",
    ):
        monkeypatch.setattr(name, forbidden)
    first, second = (ask(made, spec, cpu, argument(prefer="d"), toolchain=Toolchain({NEEDS: None})) for _ in range(2))
    monkeypatch.undo()
    assert first == second
    assert first is not second
    assert first.explain() == second.explain()
    assert first.to_dict() == second.to_dict()


def test_the_selector_imports_nothing_that_could_look_around() -> None:
    names = {node.name for node in ast.walk(ast.parse(Path(selector_module.__file__).read_text())) if isinstance(node, ast.alias)}
    assert not names & {"os", "sys", "torch", "importlib", "time", "logging"}


def test_no_backend_error_carries_the_selection_and_lists_every_reason(install: Callable[[Registry], Registry], spec: AttentionSpec) -> None:
    install(
        with_backends(
            extra=[info("a", claim(head_size=OneOf(64))), info("b", claim(row_class=OneOf("decode"))), info("d", implementation=None)], order="a>b"
        )
    )
    with pytest.raises(NoBackendError) as caught:
        attnmux.select(spec, "cpu")
    message, selection = str(caught.value), caught.value.selection
    assert isinstance(selection, Selection)
    assert selection.routes == {"decode": "b"}
    assert message.startswith("no backend can run prefill rows of heads=4/2 head_size=16 dtype=fp32 page_size=4 on cpu (the lab's CPU)")
    for candidate in selection.classes["prefill"].candidates:
        assert f"{candidate.name}: {'; '.join(map(str, candidate.reasons))}" in message
    assert "to change that: a (choice 1) would run but for head_size 16" in message
    assert "decode:" not in message


def test_an_empty_band_is_in_the_error(install: Callable[[Registry], Registry], spec: AttentionSpec) -> None:
    install(with_backends("a", order=[Order(("a",), "short", kv_len=(0, 9))]))
    with pytest.raises(NoBackendError, match="no backend can run prefill, decode rows"):
        attnmux.select(spec, "cpu")


def test_every_reason_code_can_happen(spec: AttentionSpec, cpu: Device) -> None:
    tools = (NEEDS, Program("no-such-program"), Setting("NO_SUCH", "1"))
    backends = [
        info("a", claim("cuda")),
        info("b", claim(row_class=OneOf("image"), head_size=OneOf(64))),
        info("c", requires=tools),
        info("d", implementation=None),
        info("e"),
        info("f"),
        info("g"),
    ]
    made = registry(platforms=[lab("a>b>c>d>e>ghost")], backends=backends)
    made.catalog.broken["e"] = "ImportError: no"
    found = [
        reason.code
        for sources in ((), (argument(deny="f"),), (argument(require="f"),))
        for decision in ask(made, spec, cpu, *sources, toolchain=Toolchain.of(tools)).classes.values()
        for reasons in decision.rejected.values()
        for reason in reasons
    ]
    assert set(found) == set(CODES)


def test_explain_shows_row_classes_that_were_decided_alike_once(spec: AttentionSpec, cpu: Device) -> None:
    same = ask(with_backends("a", "b"), spec, cpu).explain()
    assert "prefill, decode: platform lab_cpu: the lab's order" in same
    differ = ask(with_backends("a", "b"), spec, cpu, argument(deny={"decode": "a"})).explain()
    assert "prefill: platform lab_cpu" in differ
    assert "\ndecode: platform lab_cpu" in differ


def test_explain_of_a_dry_run_says_so(spec: AttentionSpec, cpu: Device, sm90: Device) -> None:
    made = with_backends("a")
    assert "platform lab_sm90, dry run" in ask(made, spec, sm90).explain()
    assert "dry run" not in ask(made, spec, cpu).explain()
    assert "taken with the limits of sm80" in ask(made, spec, replace(sm90, notes=("taken with the limits of sm80",))).explain()


def test_to_dict_is_json(spec: AttentionSpec, cpu: Device) -> None:
    made = with_backends("a", "b", extra=[info("picky", claim(head_size=AnyOf(OneOf(64), Range(128))))], order=BANDS)
    said = json.loads(json.dumps(ask(made, spec, cpu, argument(prefer="picky")).to_dict()))
    assert said["version"] == 1
    assert said["routes"] == {"prefill": "a", "decode": "a"}
    assert said["rejected"]["picky"][0]["text"] == "head_size 16: takes 64 or 128 or more"
    assert said["classes"]["decode"]["candidates"][0]["origin"] == "prefer (argument)"


def test_answers_and_errors_travel_between_processes(install: Callable[[Registry], Registry], spec: AttentionSpec) -> None:
    install(with_backends("a", extra=[info("picky", claim(head_size=OneOf(64)))], order=BANDS))
    selection = attnmux.select(spec, "cpu")
    assert pickle.loads(pickle.dumps(selection)) == selection
    with pytest.raises(NoBackendError) as caught:
        attnmux.select(spec, "cpu", require="picky")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.selection) == (str(caught.value), caught.value.selection)

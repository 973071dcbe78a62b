"""Steering from every source: what wins, who is named for it, how mistakes are reported, and that no stale answer comes back."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_plugins import claim, info, lab, plugin, registry

import attnmux
from attnmux.dispatch import config as config_module
from attnmux.dispatch import config_file, host
from attnmux.dispatch.claims import Composition
from attnmux.dispatch.config import VARIABLES, read_base
from attnmux.dispatch.config_file import KEYS, ORDER_KEYS, parse_config
from attnmux.dispatch.constraints import OFF, ON, OneOf, Range
from attnmux.dispatch.errors import AttnmuxError, ConfigError
from attnmux.dispatch.platform import Insertion, Order, when
from attnmux.dispatch.query import QUERY_FIELDS
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import AttentionSpec

SOURCES = ("argument", "context", "environment", "file")
VERBS = ("prefer", "require", "deny", "order")
PLATFORM = ["a", "b", "c", "d"]

Install = Callable[[Registry], Registry]
Settings = dict[str, dict[str, str]]


@pytest.fixture
def made(install: Install) -> Registry:
    backends = [info(name) for name in "abcd"] + [info("picky", claim(head_size=OneOf(64)))]
    return install(registry(platforms=[lab("a>b>c>d")], backends=backends, compositions=[Composition("mix", (("prefill", "a"), ("decode", "b")))]))


@pytest.fixture
def ask(made: Registry, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Settings], Selection]:
    """Selects with each source saying what ``settings`` gives it."""

    def asking(settings: Settings) -> Selection:
        for verb in VERBS:
            monkeypatch.delenv(f"ATTNMUX_{verb.upper()}", raising=False)
        for verb, text in settings.get("environment", {}).items():
            monkeypatch.setenv(f"ATTNMUX_{verb.upper()}", text)
        path = tmp_path / "config.toml"
        path.write_text("".join(f'{verb} = ["{text}"]\n' for verb, text in settings.get("file", {}).items()))
        monkeypatch.setenv("ATTNMUX_CONFIG", str(path))
        config_module.base.cache_clear()
        host._forget_answers()
        with ExitStack() as stack:
            if "context" in settings:
                stack.enter_context(attnmux.config(**settings["context"]))  # type: ignore[arg-type]
            return host.answer(spec, "cpu", **settings.get("argument", {}))  # type: ignore[arg-type]

    return asking


def expected(settings: Settings) -> tuple[list[str], dict[str, str]] | None:
    """Backends that can run, best first, and who put each there; ``None`` when require and deny contradict. Written from the documentation."""
    said = [(source, settings[source]) for source in SOURCES if source in settings]
    places: dict[str, str] = {}
    for source, verbs in said:
        if "prefer" in verbs:
            places.setdefault(verbs["prefer"], f"prefer ({source})")
    required = next(((source, verbs["require"]) for source, verbs in said if "require" in verbs), None)
    if required:
        places.setdefault(required[1], f"require ({required[0]})")
    for source, verbs in said:
        if "order" in verbs:
            places.setdefault(verbs["order"], source)
    for name in PLATFORM:
        places.setdefault(name, "platform lab_cpu")
    denied = {verbs["deny"] for _, verbs in said if "deny" in verbs}
    if required and required[1] in denied:
        return None
    able = [name for name in places if name not in denied and (not required or name == required[1])]
    return able, {name: places[name] for name in able}


PAIRS = [
    ({higher: {first: a}, lower: {second: b}})
    for higher, lower in itertools.combinations(SOURCES, 2)
    for first, second in itertools.product(VERBS, repeat=2)
    for a, b in (("c", "d"), ("d", "c"), ("c", "c"))
]
SINGLES = [{source: {verb: "c"}} for source in SOURCES for verb in VERBS]
SAME_SOURCE = [{source: {first: "c", second: "d"}} for source in SOURCES for first, second in itertools.combinations(VERBS, 2)]


def test_every_pair_of_sources_and_verbs(ask: Callable[[Settings], Selection], tmp_path: Path) -> None:
    contradictions = 0
    for settings in (*SINGLES, *SAME_SOURCE, *PAIRS):
        foreseen = expected(settings)
        if foreseen is None:
            contradictions += 1
            with pytest.raises(ConfigError, match=r"'c' is required by .* and denied by .*: drop one of them") as caught:
                ask(settings)
            assert all(("file " if s == "file" else s) in str(caught.value) for s in settings)
            continue
        decision = ask(settings).classes["decode"]
        found = {c.name: c.origin.replace(f"file {tmp_path / 'config.toml'}", "file") for c in decision.candidates if c.status != "rejected"}
        assert (list(found), found) == foreseen, settings
    assert contradictions == 12  # require against deny either way round, in each of six pairs


def test_every_source_is_named_for_what_it_refuses(ask: Callable[[Settings], Selection], tmp_path: Path) -> None:
    names = {s: s if s != "file" else f"file {tmp_path / 'config.toml'}" for s in SOURCES}
    for source, shown in names.items():
        assert str(ask({source: {"deny": "a"}}).rejected["a"][0]) == f"denied by deny ({shown})"
        assert str(ask({source: {"require": "b"}}).rejected["a"][0]) == f"{shown} requires b"
        note = ask({source: {"prefer": "picky"}}).classes["decode"].notes[0]
        assert note.startswith(f"prefer picky ({shown}) was not followed for decode: head_size 16")
        order = ask({source: {"order": "b"}}).classes["decode"].default.order
        assert (order.source, order.names) == (shown, ("b",))


def test_contexts_nest_and_end(made: Registry, spec: AttentionSpec) -> None:
    def ranked(**verbs: Any) -> tuple[str, ...]:
        return host.answer(spec, "cpu", **verbs).classes["decode"].ranked

    with attnmux.config(prefer="d", deny="a"):
        with attnmux.config(prefer="c"):
            assert ranked() == ("c", "d", "b")
            with attnmux.config(require="b"):
                assert ranked() == ("b",)
            assert ranked(prefer="b") == ("b", "c", "d")
        assert ranked() == ("d", "b", "c")
        with pytest.raises(KeyError), attnmux.config(order="c"):
            raise KeyError
        assert ranked() == ("d", "b", "c")
    assert ranked() == tuple(PLATFORM)


def test_the_inner_context_requires_before_the_outer(made: Registry, spec: AttentionSpec) -> None:
    with attnmux.config(require="a"), attnmux.config(require="b"):
        assert attnmux.select(spec, "cpu").name == "b"


def test_a_context_is_its_threads_own(made: Registry, spec: AttentionSpec) -> None:
    names: list[str] = []
    with attnmux.config(prefer="d"):
        thread = threading.Thread(target=lambda: names.append(attnmux.select(spec, "cpu").name))
        thread.start()
        thread.join()
        names.append(attnmux.select(spec, "cpu").name)
    assert names == ["a", "d"]


def test_a_context_is_its_tasks_own(made: Registry, spec: AttentionSpec) -> None:
    async def serve(prefer: str) -> str:
        with attnmux.config(prefer=prefer):
            await asyncio.sleep(0)
            return attnmux.select(spec, "cpu").name

    async def both() -> list[str]:
        return await asyncio.gather(serve("c"), serve("d"))

    assert asyncio.run(both()) == ["c", "d"]
    assert attnmux.select(spec, "cpu").name == "a"


def test_many_threads_get_one_answer(made: Registry, spec: AttentionSpec) -> None:
    found: list[Selection] = []
    threads = [
        threading.Thread(target=lambda: found.extend(attnmux.select(spec.replace(head_size=n), "cpu") for n in range(1, 40))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 39
    assert {s.name for s in found} == {"a"}


def test_answers_are_memoised_on_everything_that_decides(made: Registry, spec: AttentionSpec) -> None:
    first = attnmux.select(spec, "cpu")
    assert attnmux.select(AttentionSpec(**{f: getattr(spec, f) for f in spec.to_dict()}), "cpu") is first
    assert attnmux.select(spec, torch.device("cpu")) == first
    with attnmux.config():
        pass
    assert attnmux.select(spec, "cpu") is first
    assert attnmux.select(spec, "cpu", prefer="b").name == "b"
    assert attnmux.select(spec, "cpu", prefer=["b"]).name == "b"
    assert attnmux.select(spec, "cpu", prefer={"decode": "b"}).name == "mix"
    assert attnmux.select(spec, "cpu", prefer={"prefill": "b"}).name == "b+a"
    assert attnmux.select(spec, "cpu", order=[Order(("c",), "why", when(head_size=OneOf(16)))]).name == "c"
    assert attnmux.select(spec, "cpu", order=[Order(("c",), "why", when(head_size=OneOf(17)))]).name == "a"
    assert attnmux.select(spec, "cpu") is first


def test_the_memory_is_bounded(made: Registry, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MEMO_LIMIT", 3)
    for head_size in range(1, 10):
        attnmux.select(spec.replace(head_size=head_size), "cpu")
        assert len(host._memo) <= 3


def test_a_changed_registry_is_never_answered_from_memory(made: Registry, spec: AttentionSpec) -> None:
    before = attnmux.select(spec, "cpu")
    made.register(plugin(backends=[info("new")], orders=[Insertion("new", "best", before="*")]), "newcomer")
    assert attnmux.select(spec, "cpu").name == "new"
    made.unregister("newcomer")
    assert attnmux.select(spec, "cpu") == before


def test_another_registry_is_never_answered_from_memory(made: Registry, spec: AttentionSpec) -> None:
    assert attnmux.select(spec, "cpu").name == "a"
    twin = registry(platforms=[lab("b>a")], backends=[info("a"), info("b")])
    assert twin.version == made.version
    with host.using(twin):
        assert attnmux.select(spec, "cpu").name == "b"
    assert attnmux.select(spec, "cpu").name == "a"


def test_the_environment_is_read_once_and_again_by_reload_config(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not config_module.debug()
    monkeypatch.setenv("ATTNMUX_DEBUG", "1")
    assert not config_module.debug()
    attnmux.reload_config()
    assert config_module.debug()


def test_reload_config_forgets_registry_machine_and_answers(monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec) -> None:
    before = host.registry()
    host.answer(spec, "cuda:sm90")
    assert host._memo
    monkeypatch.setenv("ATTNMUX_DISABLE_PLUGINS", "attnmux.backends.flex")
    attnmux.reload_config()
    assert not host._memo
    assert host.registry() is not before
    assert host.registry().records["attnmux.backends.flex"].state == "disabled"
    assert "flex" not in host.registry().catalog.backends
    monkeypatch.delenv("ATTNMUX_DISABLE_PLUGINS")
    attnmux.reload_config()
    assert "flex" in host.registry().catalog.backends


ENVIRONMENT_MISTAKES = [
    ({"ATTNMUX_PREFFER": "a"}, "unknown environment variable ATTNMUX_PREFFER: did you mean 'ATTNMUX_PREFER'? known: ATTNMUX_PREFER"),
    ({"ATTNMUX_X": "a"}, "unknown environment variable ATTNMUX_X: "),
    ({"ATTNMUX_PREFER": "decod=a"}, "prefer (environment): unknown row class 'decod': did you mean 'decode'? known: image, prefill, decode"),
    ({"ATTNMUX_PREFER": "a,decode=b"}, "ATTNMUX_PREFER is 'a,decode=b', wanted either names or row_class=name entries, not both"),
    ({"ATTNMUX_REQUIRE": "a,,b"}, "require (environment) is ['a', '', 'b'], wanted a backend name, a list of names or {row class: name}"),
    ({"ATTNMUX_REQUIRE": "decode="}, "require (environment) is [''], wanted a backend name"),
    ({"ATTNMUX_DEBUG": "maybe"}, "ATTNMUX_DEBUG is 'maybe', wanted 1 or 0"),
    (
        {"ATTNMUX_CONFIG": "/no/such/file.toml"},
        "ATTNMUX_CONFIG names /no/such/file.toml, which is no file: correct it, or set it to nothing for no file",
    ),
]


@pytest.mark.parametrize(("environ", "message"), ENVIRONMENT_MISTAKES, ids=str)
def test_mistakes_in_the_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_base({"ATTNMUX_CONFIG": "", **environ})
    assert message in str(caught.value)
    assert isinstance(caught.value, AttnmuxError)
    assert isinstance(caught.value, ValueError)


def test_every_variable_is_read() -> None:
    base = read_base(
        {
            "ATTNMUX_PREFER": "decode=a, prefill=b",
            "ATTNMUX_REQUIRE": "a,b",
            "ATTNMUX_DENY": " c ",
            "ATTNMUX_ORDER": "a > b",
            "ATTNMUX_CONFIG": "",
            "ATTNMUX_DEBUG": "yes",
            "ATTNMUX_DISABLE_PLUGINS": "acme, acme-attn,",
            "PATH": "/bin",
        }
    )
    [steering] = base.steerings
    assert [(p.name, p.row_class) for p in steering.prefer] == [("a", "decode"), ("b", "prefill")]
    assert [p.name for p in (*steering.require, *steering.deny)] == ["a", "b", "c"]
    assert [o.names for o in steering.orders] == [("a", "b")]
    assert (base.debug, base.disabled, base.path) == (True, ("acme", "acme-attn"), None)
    assert len(VARIABLES) == 7


def test_without_a_variable_the_users_folder_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_base({}).path is None
    (tmp_path / "attnmux").mkdir()
    (tmp_path / "attnmux" / "config.toml").write_text('deny = "a"')
    base = read_base({})
    assert base.path == tmp_path / "attnmux" / "config.toml"
    assert base.steerings[1].deny[0].source == f"file {base.path}"


UNKNOWN = [
    ("prefer", "trion", "prefer (argument): unknown backend 'trion': did you mean 'triton'? known: mix, triton"),
    ("require", {"decode": "trion"}, "require (argument): unknown backend 'trion': did you mean 'triton'?"),
    ("deny", ["triton", "x"], "deny (argument): unknown backend 'x': known: triton"),
    ("deny", "mix", "deny (argument): 'mix' is a composition, wanted a backend; its parts are triton"),
    ("order", "triton>trion", "order (argument): unknown backend 'trion': did you mean 'triton'?"),
    ("prefer", 3, "prefer (argument) is 3, wanted a backend name, a list of names or {row class: name}"),
    ("prefer", [["triton"]], "prefer (argument) is [['triton']], wanted a backend name"),
    ("prefer", {"triton"}, "prefer (argument) is {'triton'}, wanted a backend name"),
    ("require", {"decode": 3}, "require (argument) is 3, wanted a backend name"),
    ("require", "", "require (argument) is '', wanted a backend name"),
    ("deny", {"decod": "triton"}, "deny (argument): unknown row class 'decod': did you mean 'decode'?"),
    ("order", 3, "order (argument) is 3, wanted a list of backend names or attnmux.plugin.Order"),
    ("order", ["triton", 3], "order (argument) holds 3, wanted backend names or attnmux.plugin.Order"),
    ("order", {"decode": "triton"}, "order (argument) is {'decode': 'triton'}, wanted a list of backend names"),
]


@pytest.mark.parametrize(("verb", "value", "message"), UNKNOWN, ids=str)
def test_unknown_names_and_wrong_types_in_arguments(verb: str, value: Any, message: str, spec: AttentionSpec, install: Install) -> None:
    install(registry(platforms=[lab("triton")], backends=[info("triton")], compositions=[Composition("mix", (("decode", "triton"),))]))
    attnmux.select(spec, "cpu")
    for _ in range(2):  # a refusal is not remembered as an answer
        with pytest.raises(ConfigError) as caught:
            attnmux.select(spec, "cpu", **{verb: value})
        assert message in str(caught.value)


def test_wrong_questions_are_type_and_value_errors(made: Registry, spec: AttentionSpec) -> None:
    with pytest.raises(TypeError, match=r"spec is dict, wanted attnmux.AttentionSpec"):
        attnmux.select(spec.to_dict(), "cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"device is \['cpu'\] \(list\), wanted a name"):
        attnmux.select(spec, ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths is 'guess', wanted 'exact' or 'upper_bound'"):
        attnmux.select(spec, "cpu", lengths="guess")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('prefr = "a"', "unknown key 'prefr': did you mean 'prefer'? known: prefer, require, deny, order, orders, backends"),
        ("prefer = 3", "prefer ({file}) is 3, wanted a backend name"),
        ("prefer = { decod = 'a' }", "prefer ({file}): unknown row class 'decod': did you mean 'decode'?"),
        ("deny = [1]", "deny ({file}) is [1], wanted a backend name"),
        ("order = 5", "{file}: order is 5, wanted a list of backend names"),
        ("orders = 5", "{file}: orders must be tables, written [[orders]]"),
        ("backends = 5", "{file}: backends must be tables, written [backends.NAME]"),
        ("[backends.a]\nwhen = 2020-01-01", "{file}: option a.when is datetime.date(2020, 1, 1), wanted a string, a number"),
        ("[[orders]]\nnames = 'a'", "{file}: orders[0]: names is 'a', wanted a list of backend names"),
        ("[[orders]]\nnames = ['']", "{file}: orders[0]: names of an order are ('',)"),
        ("[[orders]]\nnames = ['a']\nreson = 'x'", "{file}: orders[0]: unknown key 'reson': did you mean 'reason'?"),
        ("[[orders]]\nnames = ['a']\nreason = 1", "{file}: orders[0]: reason is 1, wanted a string"),
        ("[[orders]]\nnames = ['a']\n[[orders]]\nnames = ['a']\nrow_class = 'x'", "{file}: orders[1]: unknown row class 'x': known: image"),
        ("[[orders]]\nnames = ['a']\ndevice = 'cuda:hopper'", "{file}: orders[0]: device pattern 'cuda:hopper': 'hopper' is no arch of cuda"),
        ("[[orders]]\nnames = ['a']\ndevice = 'gpu'", "{file}: orders[0]: device pattern 'gpu' is not understood"),
        ("[[orders]]\nnames = ['a']\ndevice = 90", "{file}: orders[0]: device is 90, wanted a string"),
        ("[[orders]]\nnames = ['a']\nwhen = 5", "{file}: orders[0]: when is 5, wanted a table of spec fields"),
        ("[[orders]]\nnames = ['a']\nwhen = { head_sise = 64 }", "{file}: orders[0]: when: unknown key 'head_sise': did you mean 'head_size'?"),
        ("[[orders]]\nnames = ['a']\nq_len = [4, 1]", '{file}: orders[0]: q_len is [4, 1], wanted [lowest, highest] or ">=lowest"'),
        ("[[orders]]\nnames = ['a']\nkv_len = '<4'", "{file}: orders[0]: kv_len is '<4', wanted [lowest, highest]"),
        ("[[orders]]\nnames = ['a']\nkv_len = [-1, 4]", "{file}: orders[0]: kv_len is [-1, 4], wanted [lowest, highest]"),
        ("[[orders]]\nnames = ['a']\nkv_len = [true, 4]", "{file}: orders[0]: kv_len is [True, 4], wanted [lowest, highest]"),
        ("prefer = ", "{file} cannot be read: "),
    ],
)
def test_mistakes_in_the_file_name_file_key_and_what_is_known(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_base({"ATTNMUX_CONFIG": str(path)})
    assert message.format(file=f"file {path}") in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'prefer = "\xe9"')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_base({"ATTNMUX_CONFIG": str(path)})


CONDITIONS = [
    ("head_size", 64, OneOf(64)),
    ("head_size", [64, 128], OneOf(64, 128)),
    ("page_size", ">=32", Range(32)),
    ("page_size", "<= 32", Range(0, 32)),
    ("page_size", "16..64", Range(16, 64)),
    ("head_size", "%32", Range(0, of=32)),
    ("softcap", ">=30", Range(30)),
    ("scale", 0.5, OneOf(0.5)),
    ("page_size", False, OFF),
    ("sliding_window", True, ON),
    ("sinks", True, ON),
    ("sinks", False, OFF),
    ("chunk", True, ON),
    ("alibi", "sqrt", OneOf("sqrt")),
    ("alibi", True, ON),
    ("causal", True, OneOf(True)),
    ("causal", [False, "per_sequence"], OneOf(False, "per_sequence")),
    ("dtype", "bf16", OneOf(torch.bfloat16)),
    ("kv_dtype", ["fp8_e4m3fn", "float16"], OneOf(torch.float8_e4m3fn, torch.float16)),
    ("attn_type", ["cross"], OneOf("cross")),
    ("lengths", "upper_bound", OneOf("upper_bound")),
    ("group", [1, 2], OneOf(1, 2)),
]
CONDITION_MISTAKES = [
    ("head_size", "64", "when.head_size is '64', wanted a number, a list of numbers or a range such as '>=64'"),
    ("head_size", True, "when.head_size is True, wanted a number"),
    ("head_size", [], "when.head_size is an empty list, wanted a number"),
    ("head_size", "%0", "when.head_size is '%0', wanted a number"),
    ("head_size", [64, "128"], "when.head_size is '128', wanted a number"),
    ("page_size", "big", "when.page_size is 'big', wanted true, false, a number"),
    ("kv_layout", "NDH", "when.kv_layout is 'NDH', wanted 'NHD' or 'HND'"),
    ("attn_type", "encoder", "when.attn_type is 'encoder', wanted 'decoder', 'encoder_only' or 'cross'"),
    ("alibi", "square", "when.alibi is 'square', wanted true, false, 'linear' or 'sqrt'"),
    ("alibi", ">=1", "when.alibi is '>=1', wanted true, false, 'linear' or 'sqrt'"),
    ("chunk", ">=4", "when.chunk is '>=4', wanted true or false"),
    ("chunk", [256, 0], "when.chunk is 256, wanted true or false"),
    ("sinks", "yes", "when.sinks is 'yes', wanted true or false"),
    ("sinks", 1, "when.sinks is 1, wanted true or false"),
    ("causal", 1, "when.causal is 1, wanted true, false or 'per_sequence'"),
    ("dtype", "bf17", "when.dtype is 'bf17', wanted one of bf16, fp16"),
    ("dtype", 16, "when.dtype is 16, wanted a dtype such as 'bf16'"),
    ("dtype", True, "when.dtype is True, wanted a dtype such as 'bf16'"),
    ("lengths", "exactly", "when.lengths is 'exactly', wanted 'exact' or 'upper_bound'"),
]


@pytest.mark.parametrize(("field", "value", "constraint"), CONDITIONS, ids=str)
def test_conditions_of_an_order(field: str, value: Any, constraint: Any) -> None:
    steering = parse_config({"orders": [{"names": ["a"], "when": {field: value}}]}, "file x")
    assert steering.orders[0].when.fields == ((field, constraint),)


@pytest.mark.parametrize(("field", "value", "message"), CONDITION_MISTAKES, ids=str)
def test_conditions_that_could_never_hold_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"orders": [{"names": ["a"], "when": {field: value}}]}, "file x")
    assert f"file x: orders[0]: {message}" in str(caught.value)


@pytest.mark.parametrize("field", QUERY_FIELDS[2:])
def test_every_field_can_be_a_condition(field: str) -> None:
    candidates = (True, 64, "bf16", "NHD", "decoder", "exact")
    for value in candidates:
        try:
            parse_config({"orders": [{"names": ["a"], "when": {field: value}}]}, "file x")
        except ConfigError:
            continue
        return
    pytest.fail(f"no value of {field} is accepted")


def test_a_whole_file(install: Install, spec: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "all.toml"
    path.write_text("""
prefer = { decode = "b" }
deny = ["d"]
order = "c>a"

[[orders]]
names = ["d", "a"]
reason = "measured on our machines, 2026-11"
device = "cpu"
row_class = ["prefill"]
when = { head_size = [16, 32], sliding_window = true, page_size = ">=4" }
q_len = [1, 64]
kv_len = ">=32"

[backends.a]
workspace_mb = 256
tiles = [16, 32]
""")
    monkeypatch.setenv("ATTNMUX_CONFIG", str(path))
    attnmux.reload_config()
    every = [info(n, claim(sliding_window=Range(optional=True))) for n in "abcd"]
    install(registry(platforms=[lab("b>a")], backends=every))
    selection = attnmux.select(spec.replace(sliding_window=8), "cpu")
    assert selection.routes == {"prefill": "c", "decode": "b"}
    [band] = selection.classes["prefill"].bands
    assert (band.backend, band.order.q_len, band.order.kv_len, band.order.source) == ("a", (1, 64), (32, None), f"file {path}")
    assert str(band.order.when) == "device cpu, prefill rows, head_size 16 or 32, page_size 4 or more, sliding_window yes"
    assert attnmux.select(spec, "cpu").classes["prefill"].bands == ()
    assert host.options("a") == {"workspace_mb": 256, "tiles": (16, 32)}


def test_the_example_in_the_module_is_a_file_that_works(tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    path.write_text(str(config_file.__doc__).partition("Example::")[2])
    steering = read_base({"ATTNMUX_CONFIG": str(path)}).steerings[1]
    assert [o.names for o in steering.orders] == [("flash_attn_3", "triton")]
    assert steering.options == (("flashinfer", "kernel", "fa2"),)
    used = set(re.findall(r"^(?:\[\[?)?([a-z_]+)", path.read_text(), re.M))
    assert used <= {*KEYS, *ORDER_KEYS, "kernel"}


def test_options_of_backends_by_precedence(made: Registry, spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text("[backends.a]\nx = 1\ny = 1\nz = 1\n[backends.b]\nx = 9\n")
    monkeypatch.setenv("ATTNMUX_CONFIG", str(path))
    config_module.base.cache_clear()
    assert host.options("a") == {"x": 1, "y": 1, "z": 1}
    with attnmux.config(backends={"a": {"y": 2, "z": 2}}), attnmux.config(backends={"a": {"z": 3}}):
        assert host.options("a") == {"x": 1, "y": 2, "z": 3}
        assert attnmux.Attention(spec, "cpu").backend("a").options == {"x": 1, "y": 2, "z": 3}
    assert host.options("b") == {"x": 9}
    assert host.options("c") == {}


def test_an_option_that_the_backend_does_not_have(spec: AttentionSpec) -> None:
    with attnmux.config(backends={"sdpa": {"tile": 3}}), pytest.raises(ConfigError, match="the options of sdpa hold 'tile': known: none"):
        attnmux.Attention(spec, "cpu", require="sdpa")
    with (
        attnmux.config(backends={"reference": {"compute_dtyp": 3}}),
        pytest.raises(ConfigError, match="'compute_dtyp': did you mean 'compute_dtype'"),
    ):
        attnmux.Attention(spec, "cpu", require="reference")


def test_mistakes_in_options(made: Registry, spec: AttentionSpec) -> None:
    with pytest.raises(ConfigError, match=r"context: options of a are 3, wanted \{name: value\}"), attnmux.config(backends={"a": 3}):  # type: ignore[dict-item]
        pass
    with pytest.raises(ConfigError, match=r"context: option a.x is \{\}, wanted a string, a number"), attnmux.config(backends={"a": {"x": {}}}):
        pass
    with attnmux.config(backends={"aa": {"x": 1}}), pytest.raises(ConfigError, match=r"options \(context\): unknown backend 'aa': did you mean 'a'"):
        attnmux.select(spec, "cpu")


def test_names_in_the_environment_and_file_are_checked_when_selecting(ask: Callable[[Settings], Selection], tmp_path: Path) -> None:
    for source, shown in (("environment", "environment"), ("file", f"file {tmp_path / 'config.toml'}"), ("context", "context")):
        for verb in VERBS:
            with pytest.raises(ConfigError) as caught:
                ask({source: {verb: "picki"}})
            assert f"{verb} ({shown}): unknown backend 'picki': did you mean 'picky'?" in str(caught.value)


def test_a_preference_that_is_not_followed_is_logged(made: Registry, spec: AttentionSpec, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "attnmux"):
        attnmux.select(spec, "cpu", prefer={"decode": "picky"})
    assert caplog.messages == ["prefer picky (argument) was not followed for decode: head_size 16: takes 64"]

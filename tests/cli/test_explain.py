"""``attnmux explain``: its options come from the spec, its text is stable, its status says whether every row class has a backend."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from hypothesis import given

from attnmux.dispatch.cli.spec_options import add_spec_arguments, documented, spec_from
from attnmux.dispatch.spec import DTYPE_NAMES, SPEC_FIELDS, AttentionSpec, show
from attnmux.testing.strategies import specs

PLAIN = ("explain", "--device", "cuda:sm90", "--heads", "8/2", "--head-size", "128", "--dtype", "bf16")

GOLDEN = """\
asked   heads=8/2 head_size=128 dtype=bf16 page_size=16 sliding_window=1024
device  cuda:sm90 (Lab card), platform lab, dry run
answer  alpha
        prefill  alpha
        decode   alpha
graphs  no rows can be captured
        prefill rows cannot: alpha is not capturable
        decode rows cannot: alpha is not capturable

prefill: platform lab: alpha first
  *  1 alpha  here: declared, its code is not in this version yet
  -  2 beta   sliding_window 1024: not supported

decode: platform lab [decode rows]: beta decodes faster here
  -  1 beta   sliding_window 1024: not supported
  *  2 alpha  here: declared, its code is not in this version yet
  change: beta (choice 1) would run but for sliding_window 1024

* selected  + could run  - cannot
"""


@pytest.mark.usefixtures("lab")
def test_text_is_stable(run):
    status, out, err = run(*PLAIN, "--sliding-window", "1024")
    assert (status, err) == (0, "")
    assert out == GOLDEN


@pytest.mark.usefixtures("lab")
def test_incomplete_selection_is_printed_with_status_1(run):
    status, out, err = run(*PLAIN, "--sinks")
    assert (status, err) == (1, "")
    assert "incomplete" in out
    assert "sinks yes: not supported" in out


@pytest.mark.usefixtures("lab")
def test_json_is_the_selection(run):
    status, out, _ = run(*PLAIN, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["routes"] == {"prefill": "alpha", "decode": "beta"}
    assert found["spec"]["head_size"] == 128
    assert {"version", "device", "name", "classes", "complete", "rejected", "graphs", "lengths"} <= found.keys()


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize(
    ("options", "routes"),
    [
        (("--prefer", "beta"), {"prefill": "beta", "decode": "beta"}),
        (("--prefer", "prefill=beta,decode=alpha"), {"prefill": "beta", "decode": "alpha"}),
        (("--require", "decode=alpha", "--require", "prefill=beta"), {"prefill": "beta", "decode": "alpha"}),
        (("--deny", "beta"), {"prefill": "alpha", "decode": "alpha"}),
        (("--order", "beta>alpha"), {"prefill": "beta", "decode": "beta"}),
    ],
)
def test_verbs_steer(run, options, routes):
    _, out, _ = run(*PLAIN, *options, "--json")
    assert json.loads(out)["routes"] == routes


def test_the_readme_example_answers(run):
    command = "explain --device cuda:sm100 --heads 32/16 --head-size 256 --dtype bf16 --page-size 64 --mm-prefix override_window"
    status, out, _ = run(*command.split())
    assert status == 0
    assert "answer  triton_flashinfer" in out


@given(specs())
def test_every_spec_can_be_written_as_options_in_the_form_explain_shows(spec):
    words = []
    for field in SPEC_FIELDS[2:]:
        value = getattr(spec, field.name)
        if value is None and field.name != "page_size":
            continue  # an option that is left out is None
        words += [f"--{field.name.replace('_', '-')}={'packed' if value is None else show(value)}"]
    parser = argparse.ArgumentParser()
    add_spec_arguments(parser)
    args = parser.parse_args([f"--heads={spec.num_q_heads}/{spec.num_kv_heads}", *words])
    assert spec_from(args) == spec


def test_options_are_the_fields_and_each_is_explained():
    parser = argparse.ArgumentParser()
    add_spec_arguments(parser)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert set(actions) == {"heads", *(field.name for field in SPEC_FIELDS[2:])}
    assert all(action.help for action in actions.values())
    assert documented(AttentionSpec)["sliding_window"].startswith("keys a token sees, itself included")
    parser.format_help()  # a stray % in a docstring would raise


def test_flags_need_no_value():
    parser = argparse.ArgumentParser()
    add_spec_arguments(parser)
    base = ["--heads", "4", "--head-size", "64", "--dtype", "fp16"]
    assert spec_from(parser.parse_args([*base, "--sinks"])).sinks is True
    assert spec_from(parser.parse_args([*base, "--sinks", "no"])).sinks is False
    plain = spec_from(parser.parse_args(base))
    assert (plain.num_q_heads, plain.num_kv_heads, DTYPE_NAMES[plain.dtype]) == (4, 4, "fp16")
    assert plain == AttentionSpec(4, 4, 64, torch.float16)

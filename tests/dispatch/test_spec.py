"""AttentionSpec and Limits: normal form, identity, copies, and every refusal with its sentence."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from attnmux.dispatch.spec import (
    DTYPES,
    SPEC_FIELD_NAMES,
    AttentionSpec,
    Limits,
    parse_dtype,
    show,
    spec_from_dict,
)

E4M3 = torch.float8_e4m3fn
BASE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def make(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{**BASE, **fields})


FULL = make(kv_dtype=E4M3, kv_scale="head", sliding_window=9, chunk=(8, 1), softcap=30, alibi="sqrt", sinks=True, mm_prefix="within_window")

NORMAL = [
    ({}, {"v_head_size": 64, "scale": 0.125, "q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "causal": True}),
    ({"attn_type": "encoder_only"}, {"causal": False}),
    ({"attn_type": "cross"}, {"causal": False}),
    ({"dtype": "bf16"}, {"dtype": torch.bfloat16}),
    ({"dtype": "bfloat16", "kv_dtype": "fp8_e5m2"}, {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e5m2}),
    ({"scale": 1, "softcap": 50}, {"scale": 1.0, "softcap": 50.0}),
    ({"page_size": None, "kv_layout": "HND"}, {"kv_layout": "NHD"}),
]


@pytest.mark.parametrize(("given", "normal"), NORMAL)
def test_equal_needs_compare_equal(given: dict[str, Any], normal: dict[str, Any]) -> None:
    spec, written_out = make(**given), make(**{**given, **normal})
    assert {name: getattr(spec, name) for name in normal} == normal
    assert spec == written_out
    assert hash(spec) == hash(written_out)
    assert {name: type(getattr(spec, name)) for name in normal} == {name: type(value) for name, value in normal.items()}


def test_different_needs_differ() -> None:
    assert make() != make(head_size=128)
    assert make() != make(scale=0.126)
    assert len({make(), make(sinks=True), make(return_lse=True), make(page_size=None), make()}) == 4


def test_nothing_can_be_changed() -> None:
    with pytest.raises(AttributeError):
        make().head_size = 128  # type: ignore[misc]


def test_pickle_and_copies_are_equal() -> None:
    for spec in (make(), FULL):
        for twin in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
            assert twin == spec
            assert hash(twin) == hash(spec)


def test_a_pickle_is_found_in_the_dictionaries_of_another_process() -> None:
    """Hashes of strings differ between processes, so a pickled hash would be wrong there."""
    code = """
import pickle, sys, torch
from attnmux.dispatch.spec import AttentionSpec
spec = pickle.loads(sys.stdin.buffer.read())
same = AttentionSpec(8, 2, 64, torch.bfloat16, kv_dtype="fp8_e4m3fn", kv_scale="head", sliding_window=9, chunk=(8, 1), softcap=30.0,
                     alibi="sqrt", sinks=True, mm_prefix="within_window")
assert spec == same and {same: "found"}[spec] == "found"
"""
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(FULL), capture_output=True, env={"PYTHONHASHSEED": "1"}, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_to_dict_is_json_and_comes_back() -> None:
    for spec in (make(), FULL, make(page_size=None), make(causal="per_sequence")):
        assert list(spec.to_dict()) == list(SPEC_FIELD_NAMES)
        assert spec_from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("before", "changes", "follows"),
    [
        ({}, {"head_size": 256}, {"v_head_size": 256, "scale": 0.0625}),
        ({"v_head_size": 32, "scale": 0.5}, {"head_size": 256}, {"v_head_size": 32, "scale": 0.5}),
        ({}, {"dtype": torch.float16}, {"q_dtype": torch.float16, "kv_dtype": torch.float16}),
        ({"kv_dtype": E4M3}, {"dtype": torch.float16}, {"q_dtype": torch.float16, "kv_dtype": E4M3}),
        ({}, {"attn_type": "encoder_only"}, {"causal": False}),
        ({"attn_type": "cross"}, {"attn_type": "decoder"}, {"causal": True}),
        ({"causal": False}, {"head_size": 128}, {"causal": False}),
        ({"causal": "per_sequence"}, {"page_size": None}, {"causal": "per_sequence"}),
    ],
)
def test_replace_lets_derived_fields_follow(before: dict[str, Any], changes: dict[str, Any], follows: dict[str, Any]) -> None:
    changed = make(**before).replace(**changes)
    assert {name: getattr(changed, name) for name in (*changes, *follows)} == {**changes, **follows}


def test_replace_checks_like_the_constructor() -> None:
    with pytest.raises(ValueError, match="num_q_heads is 7, wanted a multiple of num_kv_heads=2"):
        make().replace(num_q_heads=7)


def test_group_and_row_classes() -> None:
    assert make().group == 4
    assert make().row_classes == ("prefill", "decode")
    assert make(mm_prefix="override_window").row_classes == ("image", "prefill", "decode")
    assert make(attn_type="encoder_only").row_classes == ("prefill",)
    assert make(attn_type="cross").row_classes == ("prefill", "decode")


def test_describe_leaves_defaults_out() -> None:
    assert make().describe() == "heads=8/2 head_size=64 dtype=bf16 page_size=16"
    assert make(page_size=None, sinks=True, causal=False).describe() == "heads=8/2 head_size=64 dtype=bf16 page_size=none causal=no sinks=yes"
    assert "chunk=8,1" in FULL.describe()


def test_show_writes_what_the_command_line_takes() -> None:
    assert [show(v) for v in (None, True, False, (8, 1), torch.float16, torch.int8, 4)] == ["none", "yes", "no", "8,1", "fp16", "torch.int8", "4"]


def test_dtypes_by_short_and_torch_names() -> None:
    for name, dtype in DTYPES.items():
        assert parse_dtype(name) is parse_dtype(name.upper()) is parse_dtype(dtype) is parse_dtype(str(dtype).removeprefix("torch.")) is dtype


TYPE_ERRORS = [
    ({"num_q_heads": "8"}, "num_q_heads is '8' (str), wanted an int"),
    ({"num_kv_heads": 2.0}, "num_kv_heads is 2.0 (float), wanted an int"),
    ({"head_size": True}, "head_size is True (bool), wanted an int"),
    ({"v_head_size": 64.5}, "v_head_size is 64.5 (float), wanted an int"),
    ({"page_size": "16"}, "page_size is '16' (str), wanted an int"),
    ({"sliding_window": True}, "sliding_window is True (bool), wanted an int"),
    ({"rswa_window": 1.5}, "rswa_window is 1.5 (float), wanted an int"),
    ({"dtype": None}, "dtype is None (NoneType), wanted a torch dtype"),
    ({"kv_dtype": 8}, "kv_dtype is 8 (int), wanted a torch dtype"),
    ({"q_dtype": 8}, "q_dtype is 8 (int), wanted a torch dtype"),
    ({"scale": "1"}, "scale is '1' (str), wanted a float or None"),
    ({"softcap": True}, "softcap is True (bool), wanted a float or None"),
    ({"sinks": 1}, "sinks is 1, wanted True or False"),
    ({"return_lse": None}, "return_lse is None, wanted True or False"),
    ({"batch_invariant": "yes"}, "batch_invariant is 'yes', wanted True or False"),
    ({"chunk": [8, 1]}, "chunk is [8, 1], wanted (size, lookback) or None"),
    ({"chunk": (8,)}, "chunk is (8,), wanted (size, lookback) or None"),
    ({"chunk": (8.0, 1)}, "chunk size is 8.0 (float), wanted an int"),
]
RANGE_ERRORS = [
    ({"num_q_heads": 0}, "num_q_heads is 0, wanted at least 1"),
    ({"num_kv_heads": -1}, "num_kv_heads is -1, wanted at least 1"),
    ({"num_q_heads": 9}, "num_q_heads is 9, wanted a multiple of num_kv_heads=2"),
    ({"head_size": 0}, "head_size is 0, wanted at least 1"),
    ({"head_size": 2**31}, "head_size is 2147483648, wanted at most 2147483647"),
    ({"v_head_size": 0}, "v_head_size is 0, wanted at least 1"),
    ({"page_size": 0}, "page_size is 0, wanted at least 1"),
    ({"sliding_window": 0}, "sliding_window is 0, wanted at least 1"),
    ({"window_right": -1, "sliding_window": 4, "causal": False}, "window_right is -1, wanted at least 0"),
    ({"rswa_window": 0}, "rswa_window is 0, wanted at least 1"),
    ({"chunk": (0, 1)}, "chunk size is 0, wanted at least 1"),
    ({"chunk": (8, -1)}, "chunk lookback is -1, wanted at least 0"),
    ({"dtype": "int8"}, "dtype is torch.int8, wanted one of bf16, fp16, fp32"),
    ({"dtype": torch.float64}, "dtype is torch.float64, wanted one of bf16, fp16, fp32"),
    ({"dtype": E4M3}, "dtype is fp8_e4m3fn, wanted bf16, fp16 or fp32; quantised caches are asked for with kv_dtype"),
    ({"kv_dtype": torch.float16}, "kv_dtype is fp16, wanted dtype (bf16) or an fp8 format"),
    ({"q_dtype": torch.float32}, "q_dtype is fp32, wanted dtype (bf16) or an fp8 format"),
    ({"scale": 0}, "scale is 0.0, wanted a finite number other than 0"),
    ({"scale": float("nan")}, "scale is nan, wanted a finite number other than 0"),
    ({"scale": 10**400}, "scale is inf, wanted a finite number other than 0"),
    ({"softcap": 0.0}, "softcap is 0.0, wanted a finite number above 0, or None for no cap"),
    ({"softcap": -3}, "softcap is -3.0, wanted a finite number above 0"),
    ({"softcap": 10**400}, "softcap is inf, wanted a finite number above 0"),
    ({"kv_scale": "page", "kv_dtype": E4M3}, "kv_scale is 'page', wanted one of None, 'tensor', 'head'"),
    ({"kv_layout": "NDH"}, "kv_layout is 'NDH', wanted one of 'NHD', 'HND'"),
    ({"attn_type": "encoder"}, "attn_type is 'encoder', wanted one of 'decoder', 'encoder_only', 'cross'"),
    ({"causal": "sometimes"}, "causal is 'sometimes', wanted one of True, False, 'per_sequence'"),
    ({"causal": 1}, "causal is 1, wanted one of True, False, 'per_sequence'"),
    ({"alibi": True}, "alibi is True, wanted one of None, 'linear', 'sqrt'"),
    ({"mm_prefix": True}, "mm_prefix is True, wanted one of None, 'override_window', 'within_window'"),
    ({"sparse": "topk"}, "sparse is 'topk', wanted None; sparse attention is reserved and not built yet"),
]
COMBINATIONS = [
    *(
        ({"attn_type": "cross", **field}, f"{next(iter(field))} with attn_type='cross' has no meaning: queries and keys share no positions")
        for field in (
            {"sliding_window": 4},
            {"chunk": (8, 0)},
            {"alibi": "linear"},
            {"mm_prefix": "within_window"},
            {"rswa_window": 4},
            {"causal": True},
            {"causal": "per_sequence"},
        )
    ),
    ({"attn_type": "encoder_only", "causal": True}, "causal=True with attn_type='encoder_only' has no meaning"),
    ({"attn_type": "encoder_only", "mm_prefix": "override_window"}, "mm_prefix with attn_type='encoder_only' has no meaning"),
    ({"attn_type": "encoder_only", "rswa_window": 4}, "rswa_window with causal=False has no meaning: R-SWA is causal"),
    ({"window_right": 3, "causal": False}, "window_right without sliding_window has no meaning"),
    ({"window_right": 3, "sliding_window": 4}, "window_right with causal=True has no meaning"),
    ({"kv_scale": "tensor"}, "kv_scale without an fp8 kv_dtype has no meaning"),
    ({"rswa_window": 4, "sliding_window": 4}, "rswa_window with sliding_window has no meaning"),
    ({"rswa_window": 4, "chunk": (8, 0)}, "rswa_window with chunk has no meaning"),
    ({"rswa_window": 4, "mm_prefix": "within_window"}, "rswa_window with mm_prefix has no meaning"),
    ({"rswa_window": 4, "causal": "per_sequence"}, "rswa_window with causal='per_sequence' has no meaning"),
]


@pytest.mark.parametrize(("fields", "message"), TYPE_ERRORS, ids=str)
def test_wrong_types_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(("fields", "message"), RANGE_ERRORS + COMBINATIONS, ids=str)
def test_wrong_values_and_combinations_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_tokens", "max_seq_len", "max_query_len"])
def test_limits_are_counts(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_tokens": 1, "max_seq_len": 1, "max_query_len": 1}
    assert getattr(Limits(**limits), name) == 1
    with pytest.raises(ValueError, match=f"{name} is 0, wanted at least 1"):
        Limits(**{**limits, name: 0})
    with pytest.raises(TypeError, match=f"{name} is 1.5"):
        Limits(**{**limits, name: 1.5})  # type: ignore[arg-type]

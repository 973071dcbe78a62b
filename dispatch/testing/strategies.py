"""Hypothesis strategies: random valid specs, and cases for a spec. The only module here that imports hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from attnmux.dispatch.spec import COMPUTE_DTYPES, FP8_DTYPES, AttentionSpec
from attnmux.testing.cases import Case, make_case
from attnmux.testing.rows import Row

HEAD_SIZES = (1, 8, 16, 24, 32, 64, 72, 80, 96, 128, 192, 256, 512)
MAX_KEYS = 80


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """Any spec that can be made: every field is drawn, combinations without meaning are avoided."""
    attn_type = draw(st.sampled_from(("decoder", "decoder", "decoder", "encoder_only", "cross")))
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from(COMPUTE_DTYPES))
    fields: dict[str, Any] = {
        "num_q_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_size": draw(st.sampled_from(HEAD_SIZES)),
        "dtype": dtype,
        "v_head_size": draw(st.none() | st.sampled_from(HEAD_SIZES)),
        "scale": draw(st.none() | st.floats(0.01, 2.0)),
        "q_dtype": draw(st.none() | st.sampled_from(FP8_DTYPES)),
        "page_size": draw(st.none() | st.sampled_from((1, 3, 8, 16, 32, 64, 128, 256))),
        "kv_layout": draw(st.sampled_from(("NHD", "HND"))),
        "attn_type": attn_type,
        "softcap": draw(st.none() | st.floats(0.5, 50.0)),
        "sinks": draw(st.booleans()),
        "return_lse": draw(st.booleans()),
        "batch_invariant": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields["kv_dtype"] = draw(st.sampled_from(FP8_DTYPES))
        fields["kv_scale"] = draw(st.sampled_from((None, "tensor", "head")))
    if attn_type != "cross":
        fields.update(draw(_masks(attn_type)))
    return AttentionSpec(**fields)


@st.composite
def _masks(draw: st.DrawFn, attn_type: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"alibi": draw(st.sampled_from((None, "linear", "sqrt")))}
    if attn_type == "decoder" and draw(st.integers(0, 7)) == 0:
        return {**fields, "rswa_window": draw(st.integers(1, MAX_KEYS))}
    choices = (None, False, "per_sequence") if attn_type == "encoder_only" else (None, True, False, "per_sequence")
    fields["causal"] = draw(st.sampled_from(choices))
    fields["sliding_window"] = draw(st.none() | st.integers(1, MAX_KEYS))
    fields["chunk"] = draw(st.none() | st.tuples(st.integers(1, MAX_KEYS), st.integers(0, 2)))
    one_sided = fields["causal"] is True or (fields["causal"] is None and attn_type == "decoder")
    if fields["sliding_window"] is not None and not one_sided:
        fields["window_right"] = draw(st.none() | st.integers(0, MAX_KEYS))
    if attn_type == "decoder":
        fields["mm_prefix"] = draw(st.sampled_from((None, "override_window", "within_window")))
    return fields


@st.composite
def rows(draw: st.DrawFn, spec: AttentionSpec) -> Row:
    """One row that the spec allows."""
    kv_len = draw(st.integers(0, MAX_KEYS))
    longest = MAX_KEYS if spec.attn_type == "cross" or kv_len == 0 else kv_len
    q_len = draw(st.integers(0, min(longest, 1)) | st.integers(0, longest))
    spans: list[tuple[int, ...]] = []
    if spec.mm_prefix:
        cuts = sorted(draw(st.sets(st.integers(0, kv_len), max_size=6)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            group = draw(st.none() | st.integers(0, 1))
            spans.append((start, end) if group is None else (start, end, group))
    return Row(q_len, kv_len, tuple(spans), draw(st.integers(0, MAX_KEYS)), draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn, spec: AttentionSpec, max_rows: int = 5) -> Case:
    """Inputs of one call for a spec, on the CPU."""
    chosen = draw(st.lists(rows(spec), min_size=1, max_size=max_rows))
    return make_case(spec, chosen, seed=draw(st.integers(0, 2**16)))

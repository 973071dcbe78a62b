"""Source of an attention variant for FlashInfer's fa2 template, for what its stock kernels do not take.

They drop ``sinks`` in silence, make up their own ALiBi slopes and measure them from the wrong place, compute tanh to 11 bits, and take
scales of an fp8 cache only from the host. A variant is a C++ struct of hooks that the template calls: scores, mask, running sum, output.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

NAME = "AttnmuxAttention"


@dataclass(frozen=True, slots=True)
class Variant:
    """What a variant computes beyond a scaled, causal, windowed softmax. Each combination is a kernel of its own.

    Args:
        softcap, alibi, sinks: as the spec has them.
        scales: ``k_scale`` and ``v_scale`` lie on the device.
        negative: the score's scale is below 0; the template takes the largest product for the largest score, so it is given scores.
        families: the variant owns the mask: keys of one family see each other both ways.
        within: a family's keys also obey the window.
    """

    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    scales: bool = False
    negative: bool = False
    families: bool = False
    within: bool = False

    @property
    def tensors(self) -> tuple[tuple[str, str], ...]:
        """Names and C types of the tensors that a run passes, in order. Some names mean something to the template: ours carry a prefix."""
        named = {
            "amx_slopes": (self.alibi, "float"),
            "amx_sinks": (self.sinks, "float"),
            "amx_k_scale": (self.scales, "float"),
            "amx_v_scale": (self.scales, "float"),
            "amx_family": (self.families, "int32_t"),
            "amx_first_key": (self.families, "int32_t"),
        }
        return tuple((name, kind) for name, (wanted, kind) in named.items() if wanted)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the doubles that a run passes after the tensors."""
        return ("amx_scale", *(["amx_cap"] if self.softcap else []), *(["amx_window"] if self.families else []))

    @property
    def label(self) -> str:
        """Features and a digest of the source, so that a cached build of another version is never taken for this one."""
        named = ("softcap", "alibi", "sinks", "scales", "negative", "families", "within")
        features = "_".join(name for name in named if getattr(self, name))
        return f"{features}_{hashlib.sha256(self.source.encode()).hexdigest()[:8]}"

    @property
    def source(self) -> str:
        """The struct. Constructors run before a kernel waits for the one in front of it (programmatic launch), so they read only what was
        copied to the device; scales are launched without that, and everything else is read in the hooks.
        """
        return _STRUCT.format(name=NAME, members=self._members(), begin=self._begin(), hooks="\n".join(filter(None, self._hooks())))

    @property
    def _scored(self) -> bool:
        return self.softcap or self.alibi or self.negative

    def _members(self) -> str:
        lines = ["  uint32_t qo_len, kv_len, window_left;", "  float sm_scale_log2, factor;"]
        lines += ["  float cap, cap_rcp;"] if self.softcap else []
        lines += ["  int32_t first_token, first_key, window;"] if self.families else []
        return "\n".join(lines)

    def _begin(self) -> str:
        lines = ["    factor = float(params.amx_scale);"]
        lines += ["    factor *= params.amx_k_scale[0];"] if self.scales else []
        if self.softcap:
            lines += ["    cap = float(params.amx_cap);", "    cap_rcp = 1.f / cap;"]
        # what LogitsTransform returns is a score already; without it the template scales
        lines += ["    sm_scale_log2 = math::log2e;" if self._scored else "    sm_scale_log2 = factor * math::log2e;"]
        if self.families:  # a span may reach back before the window, so no key may be skipped for it
            lines += ["    window_left = kv_len;", "    window = int32_t(params.amx_window);"]
            lines += ["    first_token = params.q_indptr[batch_idx];", "    first_key = params.amx_first_key[batch_idx];"]
        return "\n".join(lines)

    def _hooks(self) -> tuple[str, ...]:
        return self._scores(), _FAMILIES.format(within=_WITHIN if self.within else "") if self.families else _WINDOW, self._sums(), self._output()

    def _scores(self) -> str:
        if not self._scored:
            return ""
        lines = ["    float score = logits * factor;"]
        if self.softcap:
            lines += [
                "    const float power = math::ptx_exp2(-2.f * math::log2e * fabsf(score * cap_rcp));",
                "    score = copysignf(cap * __fdividef(1.f - power, 1.f + power), score);",
            ]
        if self.alibi:  # the true distance from the token to the key
            lines += [
                "    const int distance = int(kv_len) - int(qo_len) + int(qo_idx) - int(kv_idx);",
                "    score -= params.amx_slopes[qo_head_idx] * fabsf(float(distance));",
            ]
        return _SCORES.format(lines="\n".join([*lines, "    return score;"]))

    def _sums(self) -> str:
        return _SINK if self.sinks else ""

    def _output(self) -> str:
        factors = ["output", *(["scale"] if self.sinks else []), *(["params.amx_v_scale[0]"] if self.scales else [])]
        return _OUTPUT.format(product=" * ".join(factors)) if len(factors) > 1 else ""


_STRUCT = """
struct {name} : AttentionVariantBase {{
  static constexpr bool use_softmax = true;
{members}

  template <typename Params>
  __device__ __host__ {name}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left < 0 ? kv_len : uint32_t(params.window_left);
{begin}
  }}
{hooks}
}};
"""
_SCORES = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
{lines}
  }})"""
_WINDOW = """
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                       { return kv_len + qo_idx <= kv_idx + qo_len + window_left; })"""
# Tiles are padded with tokens beyond the row, whose answer is thrown away; they look up the last one.
_FAMILIES = """
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
    const int32_t token = int32_t(qo_idx < qo_len ? qo_idx : qo_len - 1);
    const int32_t position = int32_t(kv_len) - int32_t(qo_len) + token, key = int32_t(kv_idx);
    const bool near = window < 0 || position - key <= window;
    if (key <= position && near) return true;
    const int32_t family = position < 0 ? -1 : params.amx_family[first_key + position];
    return family >= 0{within} && params.amx_family[first_key + key] == family;
  }})"""
_WITHIN = " && near"
# The sink joins the first part of a row's keys, so that it counts once when parts are merged. Scores are to base 2 here.
_SINK = """
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    scale = 1.f;
    if (kv_tile_idx == 0) {
      const float sink = params.amx_sinks[qo_head_idx] * math::log2e;
      const float top = fmaxf(m, sink);
      if (top != -math::inf) {
        scale = math::ptx_exp2(m - top);
        d = d * scale + math::ptx_exp2(sink - top);
        m = top;
      }
    }
  })"""
_OUTPUT = """
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {{
    return m == -math::inf ? 0.f : {product} * math::ptx_rcp(d);
  }})"""

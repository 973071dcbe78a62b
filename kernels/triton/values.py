"""Bytes and numbers: exact fp8 decoding and encoding with integer operations, scores, the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decode_fp8(code, FORMAT: tl.constexpr):
    """uint8 codes of an 8-bit float as fp32, exactly, on any target.

    ``FORMAT`` is the number of mantissa bits, 3 (e4m3) or 2 (e5m2), and 10 more for fnuz. fn formats have NaN at the all-ones
    code of either sign (e5m2 also infinity); fnuz formats have one NaN, where -0 would be, and a bias one higher.
    Source: OCP 8-bit floating point specification 1.0; fnuz after Noune et al. (2022).
    """
    MANTISSA: tl.constexpr = FORMAT % 10
    FNUZ: tl.constexpr = FORMAT // 10
    BIAS: tl.constexpr = (7 if MANTISSA == 3 else 15) + FNUZ
    bits = code.to(tl.uint16)
    magnitude = bits & 0x7F
    scale = 2.0 ** (15 - BIAS)
    if FORMAT == 12:  # the highest exponent is a number here and infinity in fp16
        high = magnitude >= 64
        magnitude = tl.where(high, magnitude - 32, magnitude)
        scale = tl.where(high, 128.0, 0.5)
    half = (magnitude << (10 - MANTISSA)) | ((bits & 0x80) << 8)  # the same fields in fp16, whose subnormals scale exactly
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * scale
    if FNUZ:
        value = tl.where(bits == 0x80, float("nan"), value)
    elif MANTISSA == 3:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    return value


@triton.jit
def encode_fp8(x, largest, FORMAT: tl.constexpr):
    """fp32 to uint8 codes, rounded to nearest even, saturated at ``largest``; NaN stays NaN. ``FORMAT`` as for ``decode_fp8``."""
    MANTISSA: tl.constexpr = FORMAT % 10
    FNUZ: tl.constexpr = FORMAT // 10
    BIAS: tl.constexpr = (7 if MANTISSA == 3 else 15) + FNUZ
    bits = x.to(tl.int32, bitcast=True)
    negative = bits < 0
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), largest)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, 1 - BIAS)
    scale = ((127 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)  # 1 / quantum
    magic = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, half to even
    steps = ((size * scale + magic) - magic).to(tl.int32)
    code = ((exponent + BIAS) << MANTISSA) + steps - (1 << MANTISSA)  # a carry moves into the exponent by itself
    if FNUZ:
        code = tl.where(negative & (code != 0), code | 0x80, code)
        code = tl.where(x != x, 0x80, code)
    else:
        code = tl.where(negative, code | 0x80, code)
        code = tl.where(x != x, 0x7F, code)
    return code.to(tl.uint8)


@triton.jit
def soft_cap(score, cap, EXACT: tl.constexpr):
    """``cap * tanh(score / cap)`` without overflow: exp saturates to infinity or 0, and both ends are exact.

    Near 0 the exponential form cancels: it is off by ``cap * 2**-24``. That is far below the rounding of 16-bit inputs;
    ``EXACT`` (fp32) takes the Taylor series there.
    """
    capped = cap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / cap)) + 1.0))
    if EXACT:
        x = score / cap
        y = x * x
        series = score * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
        capped = tl.where(y < 0.0625, series, capped)
    return capped


@triton.jit
def alibi_bias(slope, pos, key, SQRT: tl.constexpr):
    """``[M, N]``: ``-slope * |q - k|``, or ``-slope * sqrt(q - k)`` and 0 beyond."""
    distance = (pos[:, None] - key[None, :]).to(tl.float32)
    if SQRT:
        return -slope[:, None] * tl.sqrt(tl.maximum(distance, 0.0))
    return -slope[:, None] * tl.abs(distance)


@triton.jit
def softmax_step(score, scale, top):
    """One tile of the online softmax, in base 2: ``(new top, pivot, correction of what was summed before)``; its weights are
    ``exp2(score * scale - pivot)``.

    ``score [M, N]`` holds ``-inf`` where masked; ``scale > 0`` multiplies it, within the one fused operation that exp2 needs anyway. A row that
    has seen nothing keeps ``top`` at ``-inf``. Source: Milakov and Gimelshein (2018), as in FlashAttention (Dao et al. 2022).
    """
    new_top = tl.maximum(top, tl.max(score, axis=1) * scale)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    return new_top, pivot, tl.exp2(top - pivot)


@triton.jit
def merge_step(acc, top, total, states, lses):
    """Add P states to a running one: ``acc [DV]``, ``top`` and ``total`` scalars, ``states [P, DV]``, ``lses [P]`` in base 2, ``-inf`` if empty."""
    new_top = tl.maximum(top, tl.max(lses, axis=0))
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(lses - pivot)
    correction = tl.exp2(top - pivot)
    states = tl.where((lses == float("-inf"))[:, None], 0.0, states)  # an empty state may hold anything
    return acc * correction + tl.sum(states * weights[:, None], axis=0), new_top, total * correction + tl.sum(weights, axis=0)


@triton.jit
def merge_sink(top, total, sink):
    """Add the sink, a state whose LSE is the logit and whose output is 0: ``(top, total, correction of the accumulator)``."""
    sink = sink.to(tl.float32) * LOG2E
    new_top = tl.maximum(top, sink)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    correction = tl.exp2(top - pivot)
    return new_top, total * correction + tl.exp2(sink - pivot), correction

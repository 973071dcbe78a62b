"""FlashAttention-3 and -4 in plain torch on a CPU: doubles for kernels that run on Hopper and Blackwell only.

They read what the kernels read: every key of a row's length through the table, hidden by a window or not, and nothing beyond;
a weight of 0 times NaN is NaN. In padding tokens they leave ``out`` alone, and return any number as log-sum-exp.
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import dataclass

import torch
from torch import Tensor

# as the wheel tokenspeed-fa3 3.0.0.post20260810 registers them
FORWARD = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,Tensor(out!)? out = None,"
    "Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,Tensor? seqused_k = None,"
    "int? max_seqlen_q = None,int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,int window_size_right = -1,"
    "int attention_chunk = 0,float softcap = 0.0,bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0,Tensor? sinks = None) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
METADATA = (
    "get_scheduler_metadata(int batch_size,int max_seqlen_q,int max_seqlen_k,int num_heads,int num_heads_k,int headdim,int headdim_v,"
    "ScalarType qkv_dtype,Tensor seqused_k,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None,Tensor? leftpad_k = None,int? page_size = None,int max_seqlen_k_new = 0,bool is_causal = False,"
    "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,bool has_softcap = False,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0) -> Tensor"
)


@dataclass(frozen=True)
class Config:
    m_block_size: int
    n_block_size: int
    mma_pv_is_rs: bool = True
    intra_wg_overlap: bool = True


def attend(q, k, v, starts, lens, table, scale, causal, left, right, softcap, sinks, out) -> Tensor:
    """Writes ``out``, returns the log-sum-exp ``[Hq, tokens]``. ``left`` and ``right``: keys seen, ``None`` for all."""
    lse = torch.full((q.shape[1], q.shape[0]), 3.0)
    group = q.shape[1] // k.shape[2]
    for row, (first, last, length) in enumerate(zip(starts.tolist(), starts.tolist()[1:], lens.tolist(), strict=False)):
        if first == last:
            continue
        keys = torch.arange(length)
        pages, offsets = table[row].long()[keys // k.shape[1]], keys % k.shape[1]
        assert length <= table.shape[1] * k.shape[1]
        assert bool((pages >= 0).all()), f"row {row} reads an entry that is -1"
        step = [
            pool.stride(0) * pages + pool.stride(1) * offsets + pool.storage_offset() for pool in (k, v)
        ]  # pages may reach beyond the pool's shape
        whole = [pool.as_strided((pool.untyped_storage().nbytes() // pool.element_size(),), (1,), 0) for pool in (k, v)]
        at = torch.arange(k.shape[2])[:, None] * torch.tensor([k.stride(2)]) + torch.arange(k.shape[3])
        keys_of, values_of = (data[begin[:, None, None] + at].float().repeat_interleave(group, 1) for data, begin in zip(whole, step, strict=True))
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), keys_of) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        ahead = keys[None, :] - torch.arange(length - (last - first), length)[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if causal:
            hidden |= ahead > 0
        if left is not None:
            hidden |= ahead < -left
        if right is not None:
            hidden |= ahead > right
        scores = scores.masked_fill(hidden, -torch.inf)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        weights = torch.where(total[..., None] == -torch.inf, 0.0, torch.exp(scores - total[..., None]))
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values_of).to(out.dtype)
        lse[:, first:last] = total
    return lse


def flash_attn_3(calls: list) -> torch.library.Library:
    """Registers the operators for CPU tensors; keep what it returns."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FORWARD)
    library.define(METADATA)

    def forward(q, k, v, *args, **named):
        given = dict(zip([a.name for a in torch.ops.flash_attn_3.fwd.default._schema.arguments[3:]], args, strict=False)) | named
        calls.append(given)
        most, left, right = given["max_seqlen_q"], given["window_size_left"], given["window_size_right"]
        starts, lens, table, causal = (given[name] for name in ("cu_seqlens_q", "seqused_k", "page_table", "is_causal"))
        assert bool((starts.diff() <= most).all())
        assert given["leftpad_k"] is not None and not bool(given["leftpad_k"].any())
        assert given["softmax_scale"] > 0 and given.get("softcap", 0.0) == 0.0
        for each in (starts, lens, given["leftpad_k"]):
            assert each.is_contiguous() and each.dtype == torch.int32
        left = -1 if left >= table.shape[1] * k.shape[1] - 1 else left
        right = -1 if right >= most - 1 else right
        sinks = given.get("sinks")
        assert sinks is None or sinks.dtype == torch.bfloat16
        seen = (None if left < 0 else left, None if right < 0 else right)
        lse = attend(q, k, v, starts, lens, table, given["softmax_scale"], causal, *seen, None, sinks, given["out"])
        lse[
            :, [t for first, last, n in zip(starts.tolist(), starts.tolist()[1:], lens.tolist(), strict=False) if n == 0 for t in range(first, last)]
        ] = -torch.inf
        return given["out"], lse, torch.empty(0), torch.empty(0)

    library.impl("fwd", forward, "CPU")
    library.impl("get_scheduler_metadata", lambda *args, **named: args[8].clone(), "CPU")
    return library


def flash_attn_4(calls: list) -> types.ModuleType:
    """A module in the place of ``flash_attn.cute.interface``."""
    module = types.ModuleType("flash_attn.cute.interface")

    def forward(q, k, v, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal, softcap, window_size_left, window_size_right,
                learnable_sink, num_splits, return_lse, out, lse, max_seqlen_q=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None):  # fmt: skip
        calls.append({"tile_mn": tile_mn, "sinks": learnable_sink, "page_table": page_table})
        assert num_splits == 1 and return_lse == (lse is not None) and max_seqlen_q is None
        right = 0 if causal else window_size_right
        args = (softmax_scale, causal, window_size_left, right, softcap, learnable_sink, out)
        found = attend(q, k, v, cu_seqlens_q, seqused_k, page_table, *args)
        if lse is not None:
            lse.copy_(found)

    def tile(head_size, v_head_size, causal, local):
        own = 128 if head_size <= 128 else 96 if head_size <= 192 else 80
        return Config(128, 144 if 64 < head_size <= 96 and not (causal or local) else own - 16 * (local and head_size > 192))

    module._flash_attn_fwd, module._tile_size_fwd_sm90 = forward, tile  # type: ignore[attr-defined]
    return module


def rows_a_pass(head_size: int) -> int:
    """Key rows that FlashAttention-4's 128 loading threads bring at a time, 16 bytes each."""
    chunk = math.gcd(head_size, 64)
    return 128 // (chunk * 2 // 16)


def install(monkeypatch, calls: list) -> None:
    """Both libraries' modules, for as long as the patch lasts."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", flash_attn_4(calls))

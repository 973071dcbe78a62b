"""Running a case through a backend, and holding the answer against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmux.dispatch.attention import Attention
from attnmux.dispatch.oracle import reference_attention
from attnmux.dispatch.plan import Plan
from attnmux.dispatch.spec import Limits
from attnmux.testing.cases import Case
from attnmux.testing.check import CheckFailed, require
from attnmux.testing.sampling import Subject

SLACK = 1e-5


@dataclass(frozen=True, slots=True)
class Answer:
    """``out [tokens, Hq, Dv]`` and, where asked for, ``lse [tokens, Hq]``; padding tokens included."""

    out: Tensor
    lse: Tensor | None

    def same_bits(self, other: Answer, tokens: slice, others: slice) -> bool:
        """Whether two answers agree bit for bit on these tokens."""
        pairs = [(self.out, other.out)] + ([(self.lse, other.lse)] if self.lse is not None and other.lse is not None else [])
        return all(torch.equal(_bits(a[tokens]), _bits(b[others])) for a, b in pairs)


def attention_for(subject: Subject, case: Case, limits: Limits | None = None) -> Attention:
    """The front door with the subject as the only backend for the classes it claims; the reference stands in for the rest."""
    claimed = subject.classes(case.spec, case.lengths)
    routes = {c: subject.name if c in claimed else "reference" for c in case.spec.row_classes}
    return Attention(case.spec, subject.device, limits=limits, require=routes)


def run_case(subject: Subject, case: Case, limits: Limits | None = None) -> Answer:
    """The subject's answer, written into NaN.

    Raises:
        CheckFailed: some row would have gone to another backend.
    """
    return run_plan(subject, attention_for(subject, case, limits).plan(case.batch), case)


def run_plan(subject: Subject, plan: Plan, case: Case) -> Answer:
    """The answer of a plan that is there already."""
    used = {name for names in plan.routes.values() for name in names}
    require(used <= {subject.name}, f"rows went to {', '.join(sorted(used))} although {subject.name} claims them")
    out, lse = case.outputs()
    plan.execute(case.q, case.k_cache, case.v_cache, out, lse, None, case.layer_args)
    return Answer(out, lse)


@dataclass(frozen=True, slots=True)
class Oracle:
    """The float64 answer, and how far from it torch lands when it computes at the case's own precision."""

    out: Tensor
    lse: Tensor
    out_allowed: float
    lse_allowed: float


def oracle(case: Case) -> Oracle:
    """The truth and the error allowed: twice torch's own at the spec's dtype, plus 1e-5.

    Torch's own is measured, and taken to be no less than one rounding: whether the largest output was hit by it is luck. A
    log-sum-exp weighs outputs of that dtype, so an error of one rounding there is one of the weight.
    """
    out, lse = reference_attention(case.q, case.k_cache, case.v_cache, case.spec, case.batch, compute_dtype=torch.float64, **case.layer)
    own_out, own_lse = reference_attention(case.q, case.k_cache, case.v_cache, case.spec, case.batch, **case.layer)
    n = case.batch.num_tokens
    rounding = torch.finfo(case.spec.dtype).eps / 2
    largest = float(out[:n].abs().max()) if n else 0.0
    out_own = max(distance(own_out[:n], out[:n]), rounding * largest)
    lse_own = max(distance(own_lse[:n], lse[:n]), rounding)
    return Oracle(out[:n], lse[:n], 2 * out_own + SLACK, 2 * lse_own + SLACK)


def truth(case: Case) -> Tensor:
    """The float64 output alone."""
    out, _ = reference_attention(case.q, case.k_cache, case.v_cache, case.spec, case.batch, compute_dtype=torch.float64, **case.layer)
    return out[: case.batch.num_tokens]


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference; infinities that agree do not count, NaN counts as infinite."""
    gap = (got.double() - want.double()).abs()
    gap = torch.where(got.double() == want.double(), 0.0, gap).nan_to_num(nan=torch.inf)
    return float(gap.max()) if gap.numel() else 0.0


def expect_close(case: Case, answer: Answer, want: Oracle) -> None:
    """The answer equals the oracle within the allowed error, and nothing else was written.

    Raises:
        CheckFailed: with the place and the numbers.
    """
    n = case.batch.num_tokens
    parts = [("out", answer.out, want.out, want.out_allowed)]
    if answer.lse is not None:
        parts.append(("lse", answer.lse, want.lse, want.lse_allowed))
    for name, got, wanted, allowed in parts:
        if (error := distance(got[:n], wanted)) > allowed:
            raise CheckFailed(f"{name} is off by {error:.2e}, allowed {allowed:.2e}{_place(case, got[:n], wanted)}")
        require(bool(torch.isnan(got[n:]).all()), f"{name} was written beyond the plan's {n} tokens")


def _place(case: Case, got: Tensor, want: Tensor) -> str:
    gap = torch.where(got.double() == want.double(), 0.0, (got.double() - want.double()).abs()).nan_to_num(nan=torch.inf)
    worst = gap.flatten(2).amax(2) if gap.dim() == 3 else gap
    token, head = divmod(int(worst.argmax()), worst.shape[1])
    row = next(i for i in range(len(case.rows)) if token < case.tokens(i).stop)
    wrong = int((torch.isnan(got.double()) & ~torch.isnan(want.double())).sum())
    nans = f", {wrong} NaN in all" if wrong else ""
    where = case.rows[row]
    return f", worst at query token {token - case.tokens(row).start} of row {row} (q_len {where.q_len}, kv_len {where.kv_len}), head {head}{nans}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)

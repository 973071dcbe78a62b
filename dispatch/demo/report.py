"""The summary of a demo run, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnmux.dispatch.demo.check import Verdict
from attnmux.dispatch.demo.display import Decode
from attnmux.dispatch.demo.engine import Engine
from attnmux.dispatch.demo.request import Request


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    Args:
        model: name of the weights.
        engine, requests: as they are after the run.
        decode: token ids to text.
        seconds: the whole serving, loading and check left out.
        verdicts: of the check; ``None`` where there was none.
    """

    model: str
    engine: Engine
    requests: Sequence[Request]
    decode: Decode
    seconds: float
    verdicts: Sequence[Verdict] | None = None

    @property
    def passed(self) -> bool:
        """Whether no request differs; true without a check."""
        return self.verdicts is None or all(v.equal for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Rates are tokens a second."""
        pool, counters = self.engine.pool, self.engine.counters
        verdicts = {v.index: v for v in self.verdicts or ()}
        return {
            "model": self.model,
            "attention": [
                {"name": s.name, "routes": dict(s.routes), "device": s.device.name, "spec": s.spec.to_dict()} for s in self.engine.runner.selections
            ],
            "tokens": {
                "prompt": sum(len(r.prompt) for r in self.requests),
                "generated": sum(len(r.generated) for r in self.requests),
            },
            "rates": {
                "prefill": _rate(counters.prompt_tokens, counters.prefill_seconds),
                "decode": _rate(counters.pure_decode_tokens, counters.decode_seconds),
                "generated": _rate(sum(len(r.generated) for r in self.requests), self.seconds),
            },
            "seconds": self.seconds,
            "counters": counters.to_dict(),
            "pages": {"size": pool.page_size, "total": pool.num_pages, "peak": pool.peak, "left": pool.used},
            "preemptions": sum(r.preemptions for r in self.requests),
            "requests": [self._request(r, verdicts.get(r.index)) for r in self.requests],
            "check": None if self.verdicts is None else {"equal": sum(v.equal for v in self.verdicts), "of": len(self.verdicts)},
        }

    def lines(self) -> list[str]:
        """The same for people; each request's text is left to the display."""
        d = self.to_dict()
        tokens, rates, counters, pages = d["tokens"], d["rates"], d["counters"], d["pages"]
        lines = [f"model       {self.model}"]
        for s in self.engine.runner.selections:
            routes = ", ".join(f"{row_class} {backend}" for row_class, backend in s.routes.items())
            lines.append(f"route       {s.name} ({routes}) on {s.device.name}, {s.spec.describe()}")
        lines += [
            f"tokens      {tokens['prompt']} prompt, {tokens['generated']} generated, {self.seconds:.1f} s",
            f"rate        prefill {rates['prefill']:.1f} tokens/s (decode rows in the same steps not counted), decode {rates['decode']:.1f} tokens/s",
            f"steps       {counters['steps']}, {counters['mixed_steps']} with decode and prefill rows together",
            f"pages       {pages['peak']} of {pages['total']} at most, {pages['size']} tokens each; preemptions: {d['preemptions']}",
        ]
        return lines

    def _request(self, request: Request, verdict: Verdict | None) -> dict[str, Any]:
        return {
            "index": request.index,
            "prompt_tokens": len(request.prompt),
            "generated": list(request.generated),
            "text": self.decode(request.generated),
            "preemptions": request.preemptions,
            "equals_eager": None if verdict is None else verdict.equal,
        }


def verdict_line(verdict: Verdict, request: Request, decode: Decode) -> str:
    """One request's result of the check."""
    if verdict.equal:
        return f"check       request {verdict.index}: all {len(request.generated)} tokens equal eager"
    at = verdict.first_difference or 0
    ours, theirs = decode(request.generated[at : at + 8]), decode(verdict.expected[at : at + 8])
    return f"check       request {verdict.index}: DIFFERS from eager at token {at}: {ours!r}, eager {theirs!r}"


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0

"""`--compare`: two runs on the same batches from the same weights, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxpar.cli.console import plain_table
from fxpar.errors import CompareError
from fxpar.train.records import StepRecord, Totals

# Largest relative difference of two losses of the same step. Rounding differs between plans and training lets it grow:
# each bound is far above what that gives over some hundred steps, and far below what a wrong gradient gives.
LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


@dataclass(frozen=True)
class Comparison:
    """Sums over all steps but the first (which sets up connections and memory). `loss_diff` is relative, of all."""

    strategy: str
    steps: int
    hot_s: float
    static_s: float
    hot_tokens_per_s: float
    static_tokens_per_s: float
    hot_cpu_ms: float
    static_cpu_ms: float
    loss_diff: float
    loss_diff_step: int
    tolerance: float

    @property
    def speedup(self) -> float:
        """Wall time of the static run over that of the run with several strategies."""
        return self.static_s / self.hot_s if self.hot_s > 0 else 0.0

    @property
    def agrees(self) -> bool:
        return self.loss_diff <= self.tolerance

    @classmethod
    def of(cls, hot: Sequence[StepRecord], static: Sequence[StepRecord], strategy: str, dtype: str) -> Comparison:
        """Raises CompareError if the runs did not see the same batches, or are shorter than two steps."""
        if [(r.step, r.sequences, r.tokens) for r in hot] != [(r.step, r.sequences, r.tokens) for r in static]:
            raise CompareError("the two runs did not train on the same mini-batches")
        if len(hot) < 2:
            raise CompareError("a comparison needs at least two steps")
        differences = [
            abs(a.loss - b.loss) / max(abs(b.loss), 1e-12) if a.loss == a.loss and b.loss == b.loss else float("inf")
            for a, b in zip(hot, static, strict=True)
        ]
        worst = max(range(len(differences)), key=differences.__getitem__)
        first, second = Totals.of(hot[1:]), Totals.of(static[1:])
        return cls(
            strategy=strategy,
            steps=len(hot) - 1,
            hot_s=first.wall_s,
            static_s=second.wall_s,
            hot_tokens_per_s=first.tokens_per_s,
            static_tokens_per_s=second.tokens_per_s,
            hot_cpu_ms=first.cpu_s * 1e3,
            static_cpu_ms=second.cpu_s * 1e3,
            loss_diff=differences[worst],
            loss_diff_step=hot[worst].step,
            tolerance=LOSS_TOLERANCE[dtype],
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup, "agrees": self.agrees}


def check_agreement(comparison: Comparison) -> None:
    """Raises CompareError if the losses differ by more than rounding."""
    if not comparison.agrees:
        raise CompareError(
            f"the losses of step {comparison.loss_diff_step} differ by {comparison.loss_diff:.1e} (relative), "
            f"more than {comparison.tolerance:.0e}: run `fxpar check` on the model to find the strategy that is wrong"
        )


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Both runs, their ratio, and whether the losses agree."""
    c = comparison
    tokens, cpu = (c.hot_tokens_per_s, c.static_tokens_per_s), (c.hot_cpu_ms, c.static_cpu_ms)
    rows = [
        ("wall time", f"{c.hot_s:.2f} s", f"{c.static_s:.2f} s", f"{c.speedup:.2f}x"),
        ("valid tokens/s", *(f"{t:,.0f}" for t in tokens), f"{_ratio(*tokens):.2f}x"),
        ("CPU time, all ranks", *(f"{ms:,.0f} ms" for ms in cpu), f"{_ratio(cpu[1], cpu[0]):.2f}x"),
    ]
    header = ("", "several strategies", f"{c.strategy} alone", "gain")
    yield from plain_table(header, rows, right=(1, 2, 3)).splitlines()
    verdict = "agree" if c.agrees else "DIFFER"
    yield (
        f"losses   {verdict}: largest relative difference {c.loss_diff:.1e}, at step {c.loss_diff_step} "
        f"(bound {c.tolerance:.0e}); times leave the first step out"
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0

"""What fxpar adds to torchtitan's log: one line per logged step, and one per length group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpar.runtime.report import StepReport, merged_text, ride_text


def step_line(step: int, reports: Sequence[StepReport], seconds: float, ranks: int) -> str:
    """Steps since the last line: valid tokens (those with a label), and how many per second of one rank."""
    valid = sum(report.valid_tokens for report in reports)
    documents = sum(report.sequences for report in reports)
    skipped = sum(report.skipped for report in reports)
    note = f"  left out: {skipped} mini-batches" if skipped else ""
    return (
        f"[fxpar] step {step}: {valid:,} valid tokens of {documents:,} documents, "
        f"valid_tps {valid / max(seconds, 1e-9) / ranks:,.0f}{note}"
    )


def group_lines(report: StepReport) -> Iterator[str]:
    """What each length group of a step was run under, in the order of running; first what left its own group."""
    for joined, into in report.merged:
        yield f"[fxpar]   {merged_text(joined, into)}"
    for own, into, number in report.rides:
        yield f"[fxpar]   {number} {ride_text(own, into)}"
    for group in report.groups:
        yield (
            f"[fxpar]   <={group.limit} {group.strategy}: {group.sequences} documents, {group.tokens:,} tokens, "
            f"longest {group.longest}, {group.micro_batches} micro-batches, {group.wall_s * 1e3:.0f} ms; switch "
            f"{group.switch_bytes / 1e6:.2f} MB in {group.switch_s * 1e3:.0f} ms, gradients "
            f"{group.reduce_bytes / 1e6:.2f} MB in {group.reduce_s * 1e3:.0f} ms"
        )


__all__ = ["group_lines", "step_line"]

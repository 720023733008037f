"""`metrics.jsonl` (one JSON object per step) and TensorBoard events."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fxpar.errors import OutputError
from fxpar.train.records import StepRecord

METRICS = "metrics.jsonl"


class MetricsFile:
    """Appends to `folder/metrics.jsonl`; lines of steps after `step` (a resumed run does them again) are dropped.

    Raises OutputError.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.path = folder / METRICS
        try:
            kept = _lines_until(self.path, step) if step else []
            self.path.write_text("".join(kept), encoding="utf-8")
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - open for the whole run
        except OSError as error:
            raise OutputError(str(self.path), error) from error

    def write(self, record: StepRecord) -> None:
        try:
            self._file.write(json.dumps(finite(record.to_json()), allow_nan=False) + "\n")
            self._file.flush()  # a reader sees each step, and a crash loses none
        except OSError as error:
            raise OutputError(str(self.path), error) from error

    def close(self) -> None:
        self._file.close()


class EventsFile:
    """TensorBoard events in `folder/tensorboard`; needs the optional package tensorboard."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = {"purge_step": step + 1} if step else {}
        self._writer = SummaryWriter(str(folder / "tensorboard"), **purge)

    def write(self, record: StepRecord) -> None:
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(record: StepRecord) -> dict[str, float]:
    """The curves of a step, by tag."""
    found: dict[str, float | None] = {
        "loss/train": record.loss,
        "loss/validation": record.validation_loss,
        "speed/valid_tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.wall_s,
        "optimizer/lr": record.lr,
        "optimizer/grad_norm": record.grad_norm,
        "optimizer/seconds": record.optimizer_s,
    }
    found |= {f"loss/{name}": value for name, value in record.tasks.items()}
    found |= {f"metrics/{name}": value for name, value in record.metrics.items()}
    found |= {f"metrics/validation_{name}": value for name, value in record.validation_metrics.items()}
    for module, figures in record.experts.items():
        found |= {f"experts_{name}/{module}": value for name, value in figures.items()}
    for group in record.groups:
        name = f"{group.limit}_{group.strategy}"
        found[f"group_s/{name}"] = group.wall_s
        found[f"group_tokens/{name}"] = group.tokens
        found[f"switch_ms/{name}"] = group.switch_s * 1e3
        found[f"reduce_ms/{name}"] = group.reduce_s * 1e3
    return {tag: value for tag, value in found.items() if value is not None}


def finite(value: Any) -> Any:
    """Infinities and NaN as None: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value


def _lines_until(path: Path, step: int) -> list[str]:
    """Whole lines of steps up to `step`; what a crash left half-written is dropped."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return kept

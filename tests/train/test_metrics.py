from __future__ import annotations

import builtins
import json

import pytest

from fxpar.errors import OutputError
from fxpar.train.loop import Hooks, run_steps
from fxpar.train.metrics import METRICS, EventsFile, MetricsFile, scalars
from tests.train.test_loop import training


def steps(count, **options):
    records = []
    run_steps(training(count, **options), 0, count, 0, Hooks(done=records.append))
    return records


def write(folder, records, step=0):
    file = MetricsFile(folder, step)
    for record in records:
        file.write(record)
    file.close()
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_one_object_per_step(tmp_path):
    records = steps(3)
    lines = write(tmp_path, records)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[1]["loss"] == records[1].loss
    assert lines[1]["metrics"] == {"accuracy": 0.5}
    assert lines[1]["tokens_per_s"] == pytest.approx(records[1].valid_tokens / records[1].wall_s)
    assert {"limit", "strategy", "switch_bytes", "reduce_s"} <= set(lines[0]["groups"][0])
    assert sum(group["tokens"] for group in lines[2]["groups"]) == lines[2]["tokens"]


def test_a_loss_that_is_no_number_is_null(tmp_path):
    assert write(tmp_path, steps(1, bad_steps=(1,)))[0]["loss"] is None


def test_a_resumed_run_has_each_step_once(tmp_path):
    records = steps(5)
    write(tmp_path, records)
    with open(tmp_path / METRICS, "a") as file:
        file.write('{"step": 6, "lo')  # a crash
    assert [line["step"] for line in write(tmp_path, records[3:], step=3)] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in write(tmp_path, records[:1])] == [1]


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(OutputError, match=r"metrics\.jsonl"):
        MetricsFile(tmp_path / "missing")


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    records = steps(3)
    events = EventsFile(tmp_path)
    for record in records:
        events.write(record)
    events.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [e.step for e in found.Scalars("loss/train")] == [1, 2, 3]
    assert found.Scalars("loss/train")[2].value == pytest.approx(records[2].loss)
    assert {"switch_ms/64_cp4", "metrics/accuracy"} <= set(found.Tags()["scalars"])
    assert set(scalars(records[2])) == set(found.Tags()["scalars"])


def test_without_tensorboard(tmp_path, monkeypatch):
    """The caller notes an ImportError; nothing else may come out."""
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError):
        EventsFile(tmp_path)

"""Multi-task models of Spindle's evaluation (arXiv 2409.03365, section 5), as MetaOps.

What a layer takes is a rule: 0.45 ms, and its FLOPs at 156 TFLOP/s (an A800, as models reach it). The CLIP models have
the published shapes of their encoders. Of the other two the paper names parts and tasks, but not all shapes and
batches: those here are assumed, chosen so that the continuous optimum per level and the lower bounds that were measured
with Spindle's open planner come out, on 8 to 64 devices to 0.5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxpar.cost.cluster import ClusterSpec
from fxpar.waves.work import MetaOp, TaskGraph

# NVLink, and a network of 400 Gb/s that eight devices share. Latency is none of what Spindle counts.
NODE = ClusterSpec(1, 8, intra_gb_per_s=200.0, inter_gb_per_s=6.25, latency_us=0.0)

_FLOPS_PER_MS = 156e9
_LAUNCH_MS = 0.45  # of a layer, forward and backward
_MOST = 1024  # devices that a batch may be cut for


@dataclass(frozen=True)
class Encoder:
    """Layers, hidden size and tokens of a sample."""

    layers: int
    hidden: int
    tokens: int

    def metaop(self, task: str, kind: str, batch: int) -> MetaOp:
        """For `batch` samples, cut by samples: any divisor of the batch is a number of devices. In bf16, with fp32
        states of Adam.
        """
        h, s = self.hidden, self.tokens
        sample_ms = 6 * (12 * s * h**2 + 2 * s**2 * h) / _FLOPS_PER_MS
        widths = [n for n in range(1, min(batch, _MOST) + 1) if batch % n == 0]
        return MetaOp(
            f"{task}.{kind}",
            self.layers,
            {n: _LAUNCH_MS + sample_ms * (batch // n) for n in widths},
            output_bytes=2 * batch * s * h,
            state_bytes=16 * 12 * h**2,
            saved_bytes=34 * batch * s * h,
            weights=kind,
        )


# ImageBind-huge (arXiv 2305.05665).
_CLIP = {
    "vision": Encoder(32, 1280, 257),
    "text": Encoder(24, 1024, 77),
    "audio": Encoder(12, 768, 229),
    "depth": Encoder(12, 384, 197),
    "thermal": Encoder(12, 768, 197),
    "imu": Encoder(6, 512, 391),
}
_CLIP_TASKS = (
    ("text", "audio", 64),
    ("vision", "depth", 64),
    ("audio", "thermal", 32),
    ("imu", "thermal", 32),
    ("vision", "text", 128),
    ("text", "depth", 32),
    ("vision", "thermal", 32),
    ("vision", "audio", 64),
    ("text", "imu", 64),
    ("depth", "thermal", 32),
)


def _clip(tasks: int) -> TaskGraph:
    found = [
        _CLIP[kind].metaop(f"t{number}-{one}-{other}", kind, batch)
        for number, (one, other, batch) in enumerate(_CLIP_TASKS[:tasks], 1)
        for kind in (one, other)
    ]
    return TaskGraph(tuple(found))


# Adaptors of six modalities before one encoder and one decoder of a language model, which seven tasks share.
_OFASYS = {
    "audio": Encoder(12, 768, 229),
    "box": Encoder(1, 768, 32),
    "image": Encoder(12, 768, 197),
    "motion": Encoder(6, 512, 391),
    "text": Encoder(1, 1024, 77),
    "encoder": Encoder(24, 1024, 128),
    "decoder": Encoder(24, 1024, 64),
}
_OFASYS_TASKS = (
    (("audio",), 128),
    (("box",), 128),
    (("image",), 8),
    (("motion",), 16),
    (("motion", "audio"), 128),
    (("text",), 8),
    (("audio",), 128),
)
# A vision transformer and an audio encoder before a language model of 7B.
_QWEN = {"vision": Encoder(48, 1664, 257), "audio": Encoder(32, 1280, 512), "lm": Encoder(32, 4096, 1024)}
_QWEN_TASKS = ((("vision",), 48), (("audio",), 16), (("vision", "audio"), 64))


def _chained(
    encoders: dict[str, Encoder], tasks: Sequence[tuple[Sequence[str], int]], trunk: Sequence[str]
) -> TaskGraph:
    """Each task has its own kinds of encoders, which the first of `trunk` reads from, the others one from the other."""
    metaops, edges = [], []
    for number, (kinds, batch) in enumerate(tasks, 1):
        task = f"t{number}-{'-'.join(kinds)}"
        metaops += [encoders[kind].metaop(task, kind, batch) for kind in (*kinds, *trunk)]
        edges += [(f"{task}.{kind}", f"{task}.{trunk[0]}") for kind in kinds]
        edges += [(f"{task}.{one}", f"{task}.{other}") for one, other in pairwise(trunk)]
    return TaskGraph(tuple(metaops), tuple(edges))


CASES = {
    **{f"clip-{tasks}": _clip(tasks) for tasks in (4, 7, 10)},
    "ofasys-7": _chained(_OFASYS, _OFASYS_TASKS, ("encoder", "decoder")),
    "qwen-val": _chained(_QWEN, _QWEN_TASKS, ("lm",)),
}

"""`MemoryPrediction`: what is said about a rank's memory, and for pipelines about each stage's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fxpar.memory.series import Peak, Series


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one pipeline stage on each of its ranks, `ranks[0]` to `ranks[1]`.

    `begins`: the module that it begins with, "" for the first; `weight_bytes`: parameters as it computes with them;
    `gradient_bytes`: what gradients add up in; `saved_bytes`: what one micro-batch leaves for its backward, at most
    `in_flight` of them at once; `received_bytes`, `sent_bytes`: messages of one micro-batch; `peak`: the stage's own
    fullest moment. `rank_peak_bytes`: all that these ranks hold, other stages of theirs and the optimizer included.
    """

    stage: int
    ranks: tuple[int, int]
    begins: str
    weight_bytes: int
    gradient_bytes: int
    saved_bytes: int
    in_flight: int
    received_bytes: int
    sent_bytes: int
    peak: Peak
    rank_peak_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """All numbers, sums included."""
        return {**asdict(self), "peak": {**asdict(self.peak), "total_bytes": self.peak.total_bytes}}


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes on the fullest rank.

    `master_bytes`: the home layout; `optimizer_bytes`: its two moments; `weight_bytes`: what the graph computes with;
    `home_gradient_bytes`: gradients as the optimizer sees them; `gradient_bytes`: what the graph accumulates in;
    `staging_bytes`: the bound of a switch's messages; `sums_bytes`: gradients that are added up inside a node on their
    way home; `body`: the peak of one micro-batch above all that.

    With pipeline stages (`schedule` says in which order they run) `body` is the peak over all micro-batches of the
    schedule, accumulators included, its `host_bytes` those of the rank with most, and `stages` has a line for each.
    `tokens` of a replica's micro-batch, by its token ids; 0 without any.
    """

    strategy: str
    sizes: Mapping[str, int]
    micro_batches: int
    master_bytes: int
    optimizer_bytes: int
    weight_bytes: int
    home_gradient_bytes: int
    gradient_bytes: int
    staging_bytes: int
    body: Peak
    schedule: str | None = None
    stages: tuple[StageMemory, ...] = ()
    sums_bytes: int = 0
    tokens: int = 0

    @property
    def per_token_bytes(self) -> float:
        """What a micro-batch keeps for its backward, per token; of stages the one that keeps most. 0.0 without token
        ids.
        """
        saved = max((stage.saved_bytes for stage in self.stages), default=self.body.saved_bytes)
        return saved / self.tokens if self.tokens else 0.0

    @property
    def state_bytes(self) -> int:
        """What is there all the time."""
        return self.master_bytes + self.optimizer_bytes + self.weight_bytes + self.home_gradient_bytes

    @property
    def step_bytes(self) -> int:
        """The peak of micro-batches: their accumulators and the body."""
        apart = self.schedule is None and self.micro_batches > 1
        return self.body.total_bytes + (self.gradient_bytes if apart else 0)

    @property
    def switch_bytes(self) -> int:
        """The peak of what lies between: gradients on their way home, their sums, messages of a switch."""
        return self.gradient_bytes + self.staging_bytes + self.sums_bytes

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + max(self.step_bytes, self.switch_bytes)

    @property
    def reserved_bytes(self) -> int:
        """What an engine with this strategy alone counts: messages beside a micro-batch, as groups may overlap, and no
        optimizer, as it does not know one.
        """
        stays = self.state_bytes - self.optimizer_bytes
        return stays + self.step_bytes + self.staging_bytes + self.sums_bytes

    def rows(self) -> list[tuple[str, int, str]]:
        """The prediction as a table: what, bytes, and what that is. The last rows are sums: of all at the peak, and of
        what an engine reserves.
        """
        body, staged = self.body, bool(self.stages)
        if staged:
            summed, of = body.result_bytes, "at the peak, of all stages of the rank"
            backward, with_ = body.backward_bytes, "at the peak"
        else:
            summed, of = self.gradient_bytes, "added to by later micro-batches"
            backward, with_ = body.backward_bytes + body.result_bytes, "at the peak, new gradients included"
            if self.micro_batches == 1:
                of = "after the micro-batch"
        by = " by the stage that keeps most" if staged else ""
        elsewhere = ", when less is held in all" if body.saved_bytes > 1.01 * body.kept_bytes else ""
        kept_per_token = f"kept for the backward{by}, at {self.tokens:,} tokens"
        rows = [
            ("master weights", self.master_bytes, "sharded over all ranks"),
            ("optimizer", self.optimizer_bytes, "AdamW, two fp32 moments"),
            ("weights", self.weight_bytes, "as the graph computes with them"),
            ("gradients", self.home_gradient_bytes, "as the optimizer sees them"),
            ("accumulators", summed, of),
            ("activations", body.forward_bytes + body.again_bytes, f"at the peak (%{body.node})"),
            ("for backward", body.saved_bytes, f"activations kept until their backward, at most{elsewhere}"),
            ("host", body.host_bytes, "activations that wait in memory of the host, at most; not of the device"),
            ("per token", round(self.per_token_bytes), kept_per_token),
            ("backward", backward, with_),
            ("workspace", body.workspace_bytes, "of the kernel at the peak"),
            ("messages", body.message_bytes, "between stages, at the peak, and batches under way"),
            ("staging", self.staging_bytes, "of a switch, at most; not at the same time as activations"),
            ("sums", self.sums_bytes, "of gradients inside a node, with the staging"),
            ("peak", self.peak_bytes, "what stays, and the larger of a micro-batch and a switch"),
            ("reserved", self.reserved_bytes, "by an engine: with staging, no optimizer; fxpar plan has both"),
        ]
        left_out = {"messages": not staged, "sums": not self.sums_bytes}
        left_out |= {"per token": not self.tokens, "host": not body.host_bytes}
        return [row for row in rows if not left_out.get(row[0])]

    def to_json(self) -> dict[str, Any]:
        """All numbers, sums included."""
        body = {**asdict(self.body), "total_bytes": self.body.total_bytes}
        names = ("state_bytes", "step_bytes", "switch_bytes", "peak_bytes", "reserved_bytes", "per_token_bytes")
        sums = {name: getattr(self, name) for name in names}
        stages = [stage.to_json() for stage in self.stages]
        return {**asdict(self), "sizes": dict(self.sizes), "body": body, "stages": stages, **sums}


def prediction_of(fields: Mapping[str, Any]) -> MemoryPrediction:
    """The prediction whose fields, by `dataclasses.asdict`, these are."""
    stages: tuple[Any, ...] = tuple({**one, "peak": Peak(**one["peak"])} for one in fields["stages"])
    made: dict[str, Any] = {"body": Peak(**fields["body"]), "stages": tuple(StageMemory(**one) for one in stages)}
    return MemoryPrediction(**{**fields, **made})


@dataclass(frozen=True)
class RankMemory:
    """What the ranks `ranks[0]` to `ranks[1]` hold; `series` is above state and accumulators.

    The series is that of a micro-batch which adds to gradients of earlier ones, if there are several; with pipeline
    stages that of the schedule.
    """

    ranks: tuple[int, int]
    prediction: MemoryPrediction
    series: Series

    @property
    def accumulator_bytes(self) -> int:
        """Gradients of earlier micro-batches, as far as the series does not count them."""
        return self.prediction.step_bytes - self.prediction.body.total_bytes


@dataclass(frozen=True)
class MemoryOverTime:
    """`prediction` as `predict_memory` makes it; `ranks` has one line, or one per rank of the pp axis."""

    prediction: MemoryPrediction
    ranks: tuple[RankMemory, ...]

"""The loss of held-out sequences: forwards alone, each length group under its own strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar.batching import GroupPlan
from fxpar.errors import EvaluateLossError, EvaluateStagesError, SharedCaptureError, muted_warnings
from fxpar.ir.graph import COUNT, Averaged, LogicalGraph
from fxpar.ir.pipeline_graph import PipelineGraph
from fxpar.losses import LossFunction, with_metrics
from fxpar.lowering import lower
from fxpar.runtime.agree import on_rank_0
from fxpar.runtime.binding import Bound, bind_here
from fxpar.runtime.calls import PlainCalls
from fxpar.runtime.engine import Engine
from fxpar.runtime.micro import MicroRun, is_first_of_replica
from fxpar.runtime.report import Evaluated, metrics_of
from fxpar.runtime.step import Given, agreed
from fxpar.switch import layout_of

_ALWAYS = "Let it return the same metrics for every batch"


@dataclass
class Evaluation:
    """Evaluates a module. Strategies with stages, and all if the loss function is `captured_only` (it need not call the
    whole model), run the program that is trained if its loss `is_as_trained` in evaluation mode, else the step that
    `capture` gives in that mode. `keys` are those of the batch that the loss function takes, `averaged` says that it
    returns a mean. `bound` is what has been run of these, by strategy.
    """

    engine: Engine
    calls: PlainCalls
    loss: LossFunction
    capture: Callable[[nn.Module], LogicalGraph]
    is_as_trained: Callable[[nn.Module], bool]
    keys: Sequence[str]
    averaged: Averaged | None = None
    captured_only: bool = False
    _as_trained: bool | None = None
    _logical: LogicalGraph | None = None
    bound: dict[str, Bound] = field(default_factory=dict)

    def run(
        self,
        module: nn.Module,
        sequences: Sequence[Tensor | Mapping[str, Tensor]],
        denominator: float | None = None,
    ) -> Evaluated:
        """Mean loss over the valid tokens of `sequences` (their sum over `denominator`, if there is one), with metrics,
        in evaluation mode and without gradients; same on all ranks.

        All ranks pass the same sequences. Raises as `train_step` does.
        """
        engine = self.engine
        (share,) = agreed([Given(engine, sequences, denominator, forward_keys=self.keys)])
        plan, sequences = share.plan, share.sequences
        names = self._names()
        total = torch.zeros(len(names), dtype=torch.float64, device=engine.device)
        modes = {part: part.training for part in module.modules()}  # parts may be in another one than the whole
        module.eval()
        try:
            for group in plan.groups:
                name = engine.names[group.group]
                if self.captured_only or self.calls.strategies[name].stages > 1:
                    sums = self._captured(module, name, sequences, group)
                else:
                    with self.calls.using(name), torch.no_grad():
                        sums = self._share(module, name, sequences, group)
                total += torch.tensor([sums[each] for each in names], dtype=torch.float64, device=engine.device)
        finally:
            for part, training in modes.items():
                part.training = training
        if dist.get_world_size() > 1:
            dist.all_reduce(total, group=engine.world_group)
        found = dict(zip(names, total.tolist(), strict=True))
        return Evaluated(found.pop("loss") * share.scale, metrics_of([found]))

    def _names(self) -> list[str]:
        """The loss and the metrics of the step that is trained, which a pipeline gives and all ranks add up."""
        program = self.engine.bound[self.engine.names[0]].program
        return [out.fqn for out in program.outputs if out.kind == "loss"]

    def _share(self, module: nn.Module, name: str, sequences: Sequence[Any], group: GroupPlan) -> dict[str, float]:
        """The sums of a replica, whose ranks all find the same ones: on its first rank, and zeros on the others. Shares
        would not add up to whole counts.
        """
        program, rank = self.engine.bound[name].program, self.engine.bound[name].rank
        mine = group.replicas[self.engine.bound[name].replica]
        found = dict.fromkeys(self._names(), 0.0)
        counts = is_first_of_replica(program, rank)
        for turn in range(group.slots):
            # Replicas make equally many calls, as the first one moves weights between all ranks.
            micro = mine[turn] if turn < len(mine) else self.engine.reading.shortest(sequences, group)
            batch = self.engine.reading.unpadded(sequences, micro, self.keys)
            sums = self._sums(module, {key: value.to(self.engine.device) for key, value in batch.items()})
            for each in found if turn < len(mine) and counts else ():
                found[each] += sums[each]
        return found

    def _sums(self, module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """The sum of the losses of a batch and of its metrics, by the user's function."""
        if self.averaged is not None:
            raise EvaluateLossError(
                "returns a mean over tokens, which cannot be added up over sequences",
                "Let it return the sum over the valid tokens, for example F.cross_entropy(..., reduction='sum'): "
                "train_step does the same with it",
            )
        value, metrics = with_metrics(self.loss(module, batch))
        found = {"loss": value}
        for name, given in metrics.items():
            pair = given if isinstance(given, tuple | list) else (given,)
            found |= dict(zip((name, name + COUNT), pair, strict=False))
        if any(isinstance(one, DTensor) for one in found.values()):
            raise EvaluateLossError(
                "uses parameters of the model itself, of which every rank has a part",
                "Compute that part in the forward, and let the loss function take it from there",
            )
        if found.keys() != set(self._names()):
            trained, here = (", ".join(sorted(set(names) - {"loss"})) or "none" for names in (self._names(), found))
            raise EvaluateLossError(f"returns other metrics ({here}) than when it was captured ({trained})", _ALWAYS)
        return {name: float(one) for name, one in found.items()}

    def _captured(self, module: nn.Module, name: str, sequences: Sequence[Any], group: GroupPlan) -> dict[str, float]:
        """What this rank tells of the sums: each counts once over all ranks."""
        if name not in self.bound:
            self.bound[name] = self._bind(module, name)
        bound, engine = self.bound[name], self.engine
        program, beside = bound.program, [group.replicas[i] for i in bound.replicas]
        here = bound.rank in program.mesh
        micro_batches = list(group.replicas[bound.replica]) if here else []
        staged, zero = isinstance(program, PipelineGraph), program.strategy.most_zero
        idle = max(map(len, beside)) - len(micro_batches) if zero == 3 or (zero and not staged) else 0
        row = partial(engine.reading.row, program, sequences)
        runs = [MicroRun(partial(row, micro), 1.0) for micro in micro_batches]
        spare = partial(row, engine.reading.shortest(sequences, group))
        runs += [MicroRun(spare, 0.0, idle=True)] * idle
        engine.switching.to(name, ())
        bound.prepare(engine.switching.store.compute(name), dict(module.named_buffers(remove_duplicate=False)))
        sums = bound.run_forward(runs)
        # A program that is trained may leave the loss to its replicas.
        tells = bound.rank == engine.ranks[0] if bound.tells is None else bound.tells
        return {each: float(value) if tells else 0.0 for each, value in sums.items()}

    def _bind(self, module: nn.Module, name: str) -> Bound:
        """The model in evaluation mode, with the weights where training has them."""
        if self._as_trained is None:
            with muted_warnings():  # all of them have come from training
                self._as_trained = on_rank_0(lambda: self.is_as_trained(module), SharedCaptureError)
        if self._as_trained:
            return self.engine.bound[name]
        strategy = self.engine.gradients.programs[name].strategy
        with muted_warnings():
            self._logical = self._logical or self.capture(module)
            program = lower(self._logical, strategy, for_store=True)
        here, there = layout_of(program).params, self.engine.switching.schedule.layouts[name].params
        if here != there:
            other = next((fqn for fqn in (*there, *here) if here.get(fqn) != there.get(fqn)), "")
            raise EvaluateStagesError(str(strategy), other)
        return bind_here(program, self.calls.process_groups, device=self.engine.device, compile=self.calls.compile)

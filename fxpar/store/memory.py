"""What the layouts of all strategies take on a rank, known before anything is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fxpar.errors import MemoryBudgetError
from fxpar.ir.columns import columns, human_bytes, told_apart
from fxpar.ir.exec_graph import Program
from fxpar.passes.share_weights import ShareWeights, StoragePass, laid_out
from fxpar.switch.layout import ParamLayout
from fxpar.switch.terms import accumulators_of


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on the fullest rank. `strategies`: name -> (bytes of its pieces alone, stays resident).

    `gradient_bytes` are the accumulators of the graph that runs (the largest; of two where groups overlap),
    `staging_bytes` the bound of the transport, with the sums of a node where gradients may go through them,
    `activation_bytes` what a micro-batch takes above the accumulators: predicted for the largest one that each strategy
    may run, and of the hungriest strategy. The optimizer's states are not among them: nobody knows the optimizer yet.
    """

    home_bytes: int
    home_gradient_bytes: int
    resident_bytes: int
    arena_bytes: int
    gradient_bytes: int
    staging_bytes: int
    strategies: Mapping[str, tuple[int, bool]]
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        weights = self.home_bytes + self.home_gradient_bytes + self.resident_bytes + self.arena_bytes
        return weights + self.gradient_bytes + self.staging_bytes + self.activation_bytes

    @property
    def shared_bytes(self) -> int:
        """What the strategies would take more if each had its own copy; 0 where padding of the arena eats that up."""
        alone = sum(size for size, _ in self.strategies.values())
        return max(0, alone - self.resident_bytes - self.arena_bytes)

    def table(self) -> str:
        """Aligned text, one line per part."""
        rows = [["what", "per rank", ""]]
        rows.append(["home weights", human_bytes(self.home_bytes), "master weights, sharded over all ranks"])
        rows.append(["home gradients", human_bytes(self.home_gradient_bytes), "for the optimizer, sharded alike"])
        rows.append(["resident weights", human_bytes(self.resident_bytes), "kept for the whole mini-batch"])
        rows.append(["arena", human_bytes(self.arena_bytes), "weights of strategies that take turns"])
        rows.append(["graph gradients", human_bytes(self.gradient_bytes), "of the graphs at work, at most"])
        rows.append(["staging", human_bytes(self.staging_bytes), "messages, and sums of a node; at most"])
        rows.append(["activations", human_bytes(self.activation_bytes), "of the largest micro-batch, predicted"])
        rows.append(
            ["total", human_bytes(self.total_bytes), f"{human_bytes(self.shared_bytes)} more if no bytes were shared"]
        )
        for name, (size, kept) in self.strategies.items():
            rows.append([f"  {name} alone", human_bytes(size), "resident" if kept else "in the arena"])
        return "\n".join(columns(rows, right=(1,)))


def memory_report(
    programs: Mapping[str, Program],
    home: ParamLayout,
    ranks: Sequence[int],
    resident: Sequence[str] | None = None,
    staging_bytes: int = 0,
    activation_bytes: int = 0,
    overlap: bool = False,
    sharing: StoragePass | None = None,
    joined: bool = False,
    chained: bool = False,
    again: Collection[str] = (),
) -> MemoryReport:
    """The report for the fullest of `ranks`; shapes only, nothing is allocated. `overlap`: gradients of one group leave
    while the next group runs. `sharing`: fxpar's own if None. `joined`: gradients of programs on parts of the ranks
    leave together. `chained`: sums travel from graph to graph. `again`: what several groups run.
    """
    trained = {out.fqn for program in programs.values() for out in program.outputs if out.kind == "grad"}
    plans = [laid_out(sharing or ShareWeights(), programs, rank, resident) for rank in ranks]
    worst = max(plans, key=lambda plan: plan.nbytes)
    accumulators = {name: None if chained else accumulators_of(program) for name, program in programs.items()}
    # As `schedule_of` has it: gradients are passed on, and what turns in the arena waits for what leaves.
    passed_on = all(name in worst.resident for name in programs)
    twice = [name for name in again if accumulators[name] is None and name in worst.resident]
    at_work = [(name if same is None or not passed_on else same, name) for name, same in accumulators.items()]
    nbytes = {same: max(_gradient_bytes(programs[name], rank) for rank in ranks) for same, name in at_work}
    return MemoryReport(
        home_bytes=home.max_bytes(),
        home_gradient_bytes=home.only(trained).max_bytes(),
        resident_bytes=worst.pool_bytes("resident"),
        arena_bytes=worst.pool_bytes("arena"),
        gradient_bytes=max(
            reserved_gradients([*nbytes.values(), *(nbytes[name] for name in twice)], overlap),
            max(map(partial(_joined_bytes, programs, home.world), ranks)) if joined else 0,
        ),
        staging_bytes=staging_bytes,
        strategies={name: (worst.strategy_bytes(name), name in worst.resident) for name in programs},
        activation_bytes=activation_bytes,
    )


def reserved_gradients(nbytes: Iterable[int], overlap: bool) -> int:
    """Bytes for accumulators of strategies that take so many each: the largest, and where one group's gradients leave
    while the next group runs the two largest.
    """
    return sum(sorted(nbytes)[-2 if overlap else -1 :])


def _joined_bytes(programs: Mapping[str, Program], world: int, rank: int) -> int:
    """Of all programs on parts of the ranks that a rank runs."""
    return sum(_gradient_bytes(one, rank) for one in programs.values() if one.mesh.size < world)


def _gradient_bytes(program: Program, rank: int) -> int:
    """Of the parts of a program that a rank has."""
    found = 0
    for part in program.storing:
        if rank in part.mesh:
            grads = [s for o, s in zip(part.outputs, part.stored_outputs, strict=True) if o.kind == "grad"]
            found += sum(s.local.numel({}) * s.local.dtype.itemsize for s in grads)
    return found


def choose_resident(
    programs: Mapping[str, Program],
    report: Callable[[tuple[str, ...], bool], MemoryReport],
    seconds: Callable[[tuple[str, ...]], float],
    budget_bytes: int | None,
    overlap: bool = False,
) -> tuple[tuple[str, ...], bool]:
    """Which strategies stay: all if they fit, else the set that fits with the least predicted switch time; and whether
    groups overlap. `overlap`: they do where any set fits with it, as that hides more than what stays saves.

    Raises MemoryBudgetError if even taking turns does not fit.
    """
    everything = tuple(programs)
    if budget_bytes is None:
        return everything, overlap
    for together in (True, False) if overlap else (False,):
        if report(everything, together).total_bytes <= budget_bytes:
            return everything, together
        fitting = [kept for kept in _subsets(everything) if report(kept, together).total_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda kept: (seconds(kept), -len(kept), kept)), together
    least = min((report(kept, False) for kept in _subsets(everything)), key=lambda r: r.total_bytes)
    raise MemoryBudgetError(*told_apart(least.total_bytes, budget_bytes), least.table())


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """All proper subsets up to 6 strategies; above that the ones that leave out the last few."""
    if len(names) > 6:
        yield from (names[:count] for count in range(len(names)))
        return
    for count in range(len(names) - 1, -1, -1):
        yield from itertools.combinations(names, count)

"""What `fxpar plan` and `simulate` share: a model of any depth, priced from shallow ones, and sets as JSON."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fxpar.annotate.experts import balanced_routes
from fxpar.batching.collate import not_made
from fxpar.batching.ids import id_limits
from fxpar.cli.cache import recorded
from fxpar.cli.console import human_bytes, human_seconds
from fxpar.cli.options import GraphSource
from fxpar.cli.source import read_rows
from fxpar.errors import PlanOptionError, VocabularyError
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.pipeline_graph import TrainGraph
from fxpar.ir.printer import without_folders
from fxpar.ir.strategy import Strategy
from fxpar.models.depth import layer_option
from fxpar.models.options import parse_assignments
from fxpar.runtime.micro import batch_keys
from fxpar.search.chosen import Rows, lowering, whole_depth
from fxpar.search.deepened import repeating
from fxpar.search.price import Depth
from fxpar.search.pricing import PricedSet


class Shallow:
    """A model with any number of layers, captured with few; lowered for a store, or only its parameters placed.

    `captured` is what captures warn of, each once.
    """

    def __init__(self, source: GraphSource) -> None:
        self._model = source.model
        option = layer_option(source.model, parse_assignments(source.options))
        self.captured: list[str] = []
        self._lowered: dict[str, tuple[str, ...]] = {}

        @functools.cache
        def captured(layers: int) -> LogicalGraph:
            read = source
            if option is not None and layers != option.layers:
                read = replace(source, options=(*source.options, f"{option.name}={layers}"))
            graph, texts = recorded(lambda: read_rows(read))
            self.captured += [text for text in texts if text not in self.captured]
            return graph

        self.depth = whole_depth(captured(1)) if option is None else Depth(option.layers, option.period)
        self.rows: Rows = (lambda _: captured(1)) if option is None else repeating(captured, self.depth)
        self._lower, self.outlines = lowering(self.rows, self.depth)

    def lower(self, strategy: Strategy, layers: int) -> TrainGraph:
        """Raises as `fxpar.lower` does."""
        found = self._lower(strategy, layers)
        self._lowered[str(strategy)] = found.notes
        return found

    @property
    def inputs(self) -> set[str]:
        """Names of what the graph takes."""
        return {info.fqn for info in self.rows(self.depth.samples(1)[0]).inputs}

    def require_sequences(self, longest: int, purpose: str, tokenizer: str | None) -> None:
        """Raises PlanOptionError for a model that takes no sequences of tokens, or none of `longest`, as its positions
        end before; those of a Hugging Face model are made as many as a run needs. VocabularyError for a tokenizer, a
        file, that has more ids than the model has rows for them.
        """
        graph = self.rows(self.depth.samples(1)[0])
        if "input_ids" not in {info.fqn for info in graph.inputs}:
            why = f"its batch has no input_ids, and {purpose} for sequences of tokens. "
            why += "Models of other batches are planned as tasks: fxpar tasks plan FILE.toml"
            raise PlanOptionError("MODEL", self._model, why)
        limits = id_limits(graph)
        tokens, positions = limits.get("input_ids"), limits.get("position_ids")
        if tokenizer is not None and tokens is not None:
            from fxpar.data import load_tokenizer

            size = load_tokenizer(tokenizer).vocab_size
            if size > tokens.rows:
                raise VocabularyError(tokenizer, size, tokens.rows)
        if positions is not None and positions.rows < longest and not self._model.startswith("hf:"):
            why = f"{positions.table} has {positions.rows:,} positions, and the longest sequence {longest:,} tokens"
            raise PlanOptionError("MODEL", self._model, f"{why}. Give it more positions, or name shorter --lengths")

    def require_tokens_alone(self, option: str, given: object) -> None:
        """Raises PlanOptionError for a model whose steps read more than can be made of token ids, which a command that
        runs it with the option draws.
        """
        brought = not_made(batch_keys(self.rows(self.depth.samples(1)[0])))
        if brought:
            why = f"it runs {self._model} on random token ids, and its batch has more: {', '.join(brought)}"
            raise PlanOptionError(option, given, f"{why}. Plan without it, and measure in a loop of your own")

    def notes(self, names: Iterable[str]) -> list[str]:
        """What captures and the programs of these strategies note, without folders."""
        of_programs = [note for name in names for note in self._lowered.get(name, ())]
        return [without_folders(note) for note in dict.fromkeys([*self.captured, *of_programs])]

    def routes(self, names: Iterable[str]) -> tuple[str, ...]:
        """What prices of these strategies assume of routers."""
        return balanced_routes(lambda: self.rows(self.depth.samples(1)[0]), map(Strategy.parse, names))


def sent_lines(plan: PricedSet) -> list[str]:
    """What a priced set sends, for people."""
    if plan.traffic is None:
        return []
    parts = {
        "micro-batches": plan.traffic.micro_batches,
        "switches": plan.traffic.switches,
        "reductions": plan.traffic.reductions,
    }
    levels = {
        "inside nodes": [f"{name} {human_bytes(round(one.intra_node))}" for name, one in parts.items()],
        "between nodes": [f"{name} {human_bytes(round(one.inter_node))}" for name, one in parts.items()],
    }
    return [f"sent {where} per mini-batch: {', '.join(said)}" for where, said in levels.items()]


def order_lines(plan: PricedSet) -> list[str]:
    """What it saves that ranks of a set are permuted, for people."""
    if plan.usual is None:
        return []
    pairs = {
        "switches": (plan.usual.switch_s, plan.switch_s),
        "reductions": (plan.usual.reduce_s, plan.reduce_s),
        "a mini-batch": (plan.usual.predicted_s, plan.predicted_s),
    }
    said = (f"{name} {human_seconds(before)} -> {human_seconds(after)}" for name, (before, after) in pairs.items())
    return [f"ranks are permuted: {', '.join(said)}"]


def set_json(plan: PricedSet) -> dict[str, Any]:
    """A priced set, as `--json` writes it."""
    return {
        "groups": [vars(group) for group in plan.groups],
        "predicted_s": plan.predicted_s,
        "simulated_s": plan.simulated_s,
        "memory_bytes": plan.memory_bytes,
        "memory_parts": plan.memory_parts,
        "switch_s": plan.switch_s,
        "reduce_s": plan.reduce_s,
        "exposed_s": plan.exposed_s,
        "optimizer_s": plan.optimizer_s,
        "link_bytes": plan.traffic and plan.traffic.to_json(),
        "usual_order": plan.usual and set_json(plan.usual),
    }

"""Are the ids of a mini-batch rows of the tables that they index? Asked before anything runs.

Inside of a graph nothing can look at data and raise: an id that no table has gives NaN there, or a row of zeros where
the table is cut over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxpar.batching.collate import ALIASES, Tokens, collate, is_whole
from fxpar.batching.plan import MicroBatch
from fxpar.errors import TokenIdError
from fxpar.ir.graph import LogicalGraph
from fxpar.ir.node_meta import source_of, tensor_of
from fxpar.ir.printer import without_folders
from fxpar.ops.traits import EMBEDDINGS, KEEPS_ALL, LABEL_LOSSES

aten, own = torch.ops.aten, torch.ops.fxpar

# Ops whose result has no values but those of their first operand, and numbers of the graph's own. A select is none of
# them: values of another place may index another table.
_KEEP_VALUES = KEEPS_ALL | {aten.constant_pad_nd.default, aten.slice.Tensor}


@dataclass(frozen=True)
class IdLimit:
    """Values of a batch key are 0 to `rows` - 1, or one of `ignored`; `table` is what they index."""

    rows: int
    table: str
    ignored: frozenset[int] = frozenset()

    def outside(self, values: Tensor) -> Tensor:
        """Which values are none of these."""
        values = values.long()  # wide unsigned numbers cannot be compared
        bad = (values < 0) | (values >= self.rows)
        for number in self.ignored:
            bad &= values != number
        return bad

    def any_outside(self, columns: Sequence[Tensor]) -> bool:
        """Whether any value of the columns is none of these."""
        values = torch.cat([column.reshape(-1).long() for column in columns])
        low, high = torch.aminmax(values)
        inside = int(low) >= 0 and int(high) < self.rows
        return not inside and bool(self.outside(values).any())


def id_limits(logical: LogicalGraph, aliases: Mapping[str, str] = ALIASES) -> dict[str, IdLimit]:
    """The limit of each batch key whose values index tables of fixed size as they are: that of the smallest table. Keys
    that have `aliases` are called by these.
    """
    found: dict[str, IdLimit] = {}
    for node, info in zip(logical.placeholders, logical.inputs, strict=True):
        if info.kind == "batch" and is_whole(info.meta.dtype):
            limits = list(_limits(node))
            if limits:
                found[aliases.get(info.fqn, info.fqn)] = min(limits, key=lambda limit: limit.rows)
    return found


def _limits(ids: fx.Node) -> Iterator[IdLimit]:
    """What the values of `ids` index, directly or through ops that keep them."""
    for user in ids.users:
        if user.args[0] is ids and _keeps_values(user):
            yield from _limits(user)
        elif user.target in EMBEDDINGS | LABEL_LOSSES:
            rows = tensor_of(user.args[0]).shape[int(user.target in LABEL_LOSSES)]
            if user.args[1] is ids and isinstance(rows, int):
                yield IdLimit(rows, _name(user), _ignored(user, ids))
        elif user.target is aten.gather.default and user.args[2] is ids:
            rows = tensor_of(user.args[0]).shape[int(user.args[1])]  # type: ignore[arg-type]
            if isinstance(rows, int):
                yield IdLimit(rows, _name(user))


def _keeps_values(node: fx.Node) -> bool:
    return node.target in _KEEP_VALUES or (node.target is aten._to_copy.default and is_whole(tensor_of(node).dtype))


def _ignored(lookup: fx.Node, ids: fx.Node) -> frozenset[int]:
    """Labels that a loss leaves out: it compares them with a number, or is told the number."""
    if lookup.target not in LABEL_LOSSES:
        return frozenset()
    numbers = [user.args[1] for user in ids.users if user.target in (aten.eq.Scalar, aten.ne.Scalar)]
    if lookup.target is not own.cross_entropy.default:
        numbers.append(lookup.args[4])
    return frozenset(n for n in numbers if isinstance(n, int))


def _name(lookup: fx.Node) -> str:
    """What a user calls the table of a lookup."""
    if lookup.target is aten.gather.default:
        line = without_folders(source_of(lookup) or "")
        return f"the dim that it picks from{f' at {line}' if line else ''}"
    return (
        "the table of logits"
        if lookup.target in LABEL_LOSSES
        else f"the table of {lookup.meta.get('fqn') or lookup.args[0]!r}"
    )


def check_ids(sequences: Sequence[Tokens], limits: Mapping[str, IdLimit]) -> None:
    """Raise TokenIdError for the first id without a row. `sequences` are what `check_sequences` lets pass."""
    for key, limit in limits.items():
        # One look at all of them: without a bad id this is a few calls, however many sequences there are.
        given = [values for one in sequences if (values := _column(one, key)) is not None]
        made = len(given) < len(sequences) and _made_may_be_outside(sequences, key, limits)
        if made or (given and limit.any_outside(given)):
            _find(sequences, key, limit)


def _made_may_be_outside(sequences: Sequence[Tokens], key: str, limits: Mapping[str, IdLimit]) -> bool:
    """Whether a column that `collate` makes of the ids can have a value without a row."""
    ids = [values for one in sequences if (values := _column(one, "input_ids")) is not None]
    if key == "position_ids":
        return max(map(len, ids)) > limits[key].rows
    if key != "labels":
        return False
    known = limits.get("input_ids")
    return (known is None or known.rows > limits[key].rows) and limits[key].any_outside(ids)


def _find(sequences: Sequence[Tokens], key: str, limit: IdLimit) -> None:
    """TokenIdError for the first bad value, if there is one."""
    for index, sequence in enumerate(sequences):
        values = _column(sequence, key)
        if values is None and key in ("labels", "position_ids"):
            values = collate(sequences, MicroBatch((index,), 0), [key])[key][0]
        bad = torch.empty(0) if values is None else limit.outside(values).nonzero()
        if values is not None and len(bad):
            value = int(values[tuple(bad[0])])
            raise TokenIdError(index, int(bad[0, 0]), key, value, limit.rows, limit.table)


def _column(sequence: Tokens, key: str) -> Tensor | None:
    """What a sequence brings under a key, or another name of it."""
    if isinstance(sequence, Tensor):
        return sequence if key == "input_ids" else None
    return next((value for name, value in sequence.items() if ALIASES.get(name, name) == key), None)

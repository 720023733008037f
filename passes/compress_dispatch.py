"""Compress dispatch: experts see the means of similar rows in place of the rows, as LSH-MoE does.

Before: every row, a token for one of its experts, goes through the products of that expert. After: rows of one expert
that hash alike are one row, their mean; each row gets what the expert makes of its mean, and its own distance to that
(`fxpar.ops.compress`). Gradients go back the same way.

    %h = expert_mm(%x, %w, %ids)                %codes = hash_rows(%x)
    %y = expert_mm(silu(%h), %v, %ids)          %of, %sizes, %ids_of = cluster_rows(%codes, %ids)
                                                %m = cluster_mean(%x, %of, %sizes)
                                                %h = expert_mm(%m, %w, %ids_of)
                                                %r = expert_mm(silu(%h), %v, %ids_of)
                                                %y = cluster_restore(%r, %x, %m, %of, %sizes)

Clusters are of the rows that a rank has, whatever other ranks have; ranks with the same rows make the same clusters.
There are as many as the strategy's share of the rows, but not less than that share of `pool` rows per expert: a small
micro-batch, which has little to spare, is compressed less or not at all. Saves: of the experts' work, of what they save
for the backward, and of the rows that travel to them, all but the share. Costs: a product of the tokens with
hashes * columns vectors, a sort, and two passes over the rows each way. On a known cluster a layer is left as it is
where that is predicted to cost more than it saves (`fxpar.cost.compressed`).

Under ep a codec has means, what experts make of them, and gradients of both travel in fewer bytes:

    %m = cluster_mean(%x, %of, %sizes)          %n = unpack_rows(pack_rows(%m), float32)      "fp8"
    %h = expert_mm(%m, %w, %ids_of)             %h = expert_mm(%n, %w, %ids_of)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from fxpar.cost.cluster import ClusterSpec
from fxpar.cost.compressed import Compressed, Gain, gain
from fxpar.cost.hops import between_nodes
from fxpar.cost.ops import SizesAt, flops
from fxpar.errors import NothingToCompressError, PassOptionError
from fxpar.flow.expert_rows import PRODUCTS, ExpertRows, expert_rows, experts_axis, layers_of
from fxpar.ir.dist_config import AxisShard, DistConfig
from fxpar.ir.graph import AnnotatedGraph, LogicalGraph, Size, TensorMeta, run_dims
from fxpar.ir.mesh import Mesh
from fxpar.ir.node_meta import dist_of, fqn_of, local_meta, local_tensor, tensor_of
from fxpar.ir.pass_base import Tier
from fxpar.ir.steps import steps
from fxpar.ir.strategy import Strategy
from fxpar.ops.compress import budget_share
from fxpar.ops.traits import SIZES

aten, own = torch.ops.aten, torch.ops.fxpar
_SEED = 0  # of the random vectors: the same in every layer, run and machine
_CODECS = {"bf16": lambda width: 2 * width, "fp8": lambda width: width + 4}  # bytes of a row


@dataclass(frozen=True)
class CompressDispatch:
    """Reads the share of rows from the strategy and its rules. `hashes` of 2 * `columns` values each: more of them tell
    more rows apart, where the budget allows it. `codec`: "bf16" or "fp8" (float8_e4m3fn with a scale per row), in which
    means travel to experts of other ranks and back; None: as they are. With `between`, rows of experts on the rank's
    own node stay as they are, and so do layers whose experts are all on one.

    With a `cluster`, a layer is compressed where that is predicted to save time, in a micro-batch of `sizes`, by
    default the example's. Raises ExpertRowsError, PassOptionError.
    """

    hashes: int = 8
    columns: int = 8
    pool: int = 64
    codec: str | None = None
    between: bool = False
    cluster: ClusterSpec | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    name: ClassVar[str] = "compress_dispatch"
    tier: ClassVar[Tier] = "lossy"

    def __post_init__(self) -> None:
        if self.codec not in (None, *_CODECS):
            raise PassOptionError(self.name, "codec", f"{self.codec!r} is none of {', '.join(_CODECS)}")

    def __call__(self, graph: AnnotatedGraph) -> None:
        strategy = graph.strategy
        if not strategy.most("lsh"):
            return
        if self.between and self.cluster is None:
            raise PassOptionError(self.name, "between", "it needs a cluster, which says what is a node: give cluster=")
        found, left, far = list[_Layer](), list[Gain](), 0
        for products in layers_of(graph):
            rate = strategy.share_of("lsh", strategy.rule_of(fqn_of(products[0]), "lsh"))
            if not rate:
                continue
            layer = _Layer(graph, expert_rows(graph, products), self, rate)
            if self.between and layer.places == 1:
                far += 1
            elif layer.gain is None or layer.gain.pays:
                found.append(layer)
                layer.compress()
            else:
                left.append(layer.gain)
        if found:
            graph.notes.append(_saving(found, graph))
        if left:
            graph.notes.append(_not_worth_it(left))
        if far:
            graph.notes.append(f"lsh: experts of {_layers(far)} see all rows, which do not leave their node")


def check_compressed(logical: LogicalGraph, strategy: Strategy) -> None:
    """Raises NothingToCompressError where the strategy or a rule of it compresses or limits the rows of experts, and
    there are none.
    """
    for flag in filter(strategy.most, ("lsh", "capacity")):
        nodes = list(logical.gm.graph.find_nodes(op="call_function", target=own.expert_mm.default))
        if strategy.blocks:
            if not nodes:
                raise NothingToCompressError(str(strategy), "", logical.name, flag)
            continue  # which stage has which experts is not known before stages are cut
        governed = {strategy.rule_of(fqn_of(node), flag) for node in nodes}
        for rule in (None, *range(len(strategy.rules))):
            if strategy.share_of(flag, rule) and rule not in governed:
                named = "" if rule is None else str(strategy.rules[rule])
                raise NothingToCompressError(str(strategy), named, logical.name, flag)


def without_loss(strategy: Strategy) -> Strategy:
    """With a budget for every row wherever means stand in for rows, and without capacities."""
    rules = tuple(
        replace(rule, lsh=1.0 if rule.lsh else rule.lsh, capacity=rule.capacity and 0.0) for rule in strategy.rules
    )
    by_stage, teams = (tuple(map(without_loss, blocks)) for blocks in (strategy.by_stage, strategy.teams))
    return replace(strategy, lsh=float(strategy.lsh > 0), capacity=0.0, rules=rules, by_stage=by_stage, teams=teams)


def most_clusters(rows: Size, rate: float, least: int, places: int = 1) -> Size:
    """`fxpar.ops.compress.most_clusters` of a size in the dynamic dims."""
    share = budget_share(rate, places)
    few = sympy.floor(sympy.Mul(sympy.Rational(share.numerator, share.denominator), rows))
    found = sympy.Max(few, sympy.Min(rows, least))
    return int(found) if found.is_Integer else found


def _saving(layers: Sequence[_Layer], graph: AnnotatedGraph) -> str:
    """What it comes to on a rank."""
    sizes = layers[0].sizes
    seen = sum(sizes.size(sympy.sympify(layer.few)) for layer in layers)
    rows = sum(sizes.size(layer.many) for layer in layers)
    hashes = graph.graph.find_nodes(op="call_function", target=own.hash_rows.default)
    saved, spent = sum(one.work for one in layers) / 1e9, sum(int(flops(node, sizes)) for node in hashes) / 1e9
    at = ", ".join(f"{dim} = {size:,}" for dim, size in sizes.dims.items())
    found = (
        f"lossy: experts of {_layers(len(layers))} see at most {seen:,} of {rows:,} rows in a micro-batch of {at}, "
        f"which saves {saved:.3g} GFLOP, and takes {spent:.3g} to hash"
    )
    gains = [layer.gain for layer in layers if layer.gain is not None]
    return f"{found}; {_times(gains)}" if gains else found


def _not_worth_it(gains: Sequence[Gain]) -> str:
    return f"lsh: experts of {_layers(len(gains))} see all rows, as means would not pay: {_times(gains)}"


def _times(gains: Sequence[Gain]) -> str:
    saved, spent = (float(sum(times)) * 1e3 for times in zip(*((g.saved_s, g.spent_s) for g in gains), strict=True))
    return f"on this cluster that is predicted to save {saved:.3g} ms of a micro-batch, and to take {spent:.3g} ms"


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


class _Layer:
    """The rows of one layer of experts, and what means of them need in their place."""

    def __init__(self, graph: AnnotatedGraph, rows: ExpertRows, options: CompressDispatch, rate: float) -> None:
        self.graph, self.rows, self.options, self.rate = graph.graph, rows, options, rate
        self.rank = len(local_tensor(rows.ids).shape)
        weight: Any = rows.y.args[1]
        experts: Any = tensor_of(weight).shape[0]
        self.experts: int = experts
        self.axis = experts_axis(rows.y, graph.strategy)
        cluster, mesh = options.cluster, graph.strategy.mesh
        self.outer = between_nodes(mesh, self.axis, cluster) if options.between and self.axis and cluster else ""
        self.places = mesh.degree(self.outer) if self.outer else 1
        least = (2 if self.outer else 1) * experts + 1
        self.least = max(least, experts * math.ceil(options.pool * Fraction(str(rate))))
        self.many: Size = sympy.Mul(*local_tensor(rows.ids).shape)
        self.few = most_clusters(self.many, rate, self.least, self.places)
        self.new: dict[fx.Node, fx.Node] = {}  # what stands in the place of what
        self.exact: dict[fx.Node, fx.Node] = {}  # of means and sums, before they travel
        self.count: fx.Node | None = None  # `few`, where an argument says it
        self.sizes = SizesAt(run_dims(graph, dict(options.sizes)))
        self.work = self._work([*rows.inside, *rows.sums])
        self.gain = None if cluster is None else self._gain(mesh, cluster)

    def _gain(self, mesh: Mesh, cluster: ClusterSpec) -> Gain:
        rows, options = self.rows, self.options
        meta = local_tensor(rows.x)
        width: Any = meta.shape[-1]
        sent = _CODECS[str(options.codec)](width) if self._is_packed(meta.dtype) else width * meta.dtype.itemsize
        many, few = (self.sizes.size(sympy.sympify(size)) for size in (self.many, self.few))
        slots: Any = local_tensor(rows.ids).shape[1] if self.rank > 1 else 1
        vectors, ways = options.hashes * options.columns, 1 if rows.dy is None else 2
        one = Compressed(many, few, slots, width, meta.dtype, self.experts, self.axis, sent, vectors, ways)
        return gain(one, [*rows.inside, *rows.sums], self.sizes, mesh, cluster)

    def compress(self) -> None:
        rows, graph = self.rows, self.graph
        inside = sorted((*rows.beside, *rows.inside, *rows.sums))
        first = min(rows.inside)
        readers = {node: [*node.users] for node in (rows.y, *rows.dx, *rows.sums)}
        with graph.inserting_before(first):
            self._cluster()
        for node in inside:
            with graph.inserting_before(max(node, first)):
                if rows.dy in node.all_input_nodes and rows.dy not in self.new:
                    self._gradient()
                self._copy(node)
        self._give(rows.y, self._restored(), readers[rows.y])
        for node in rows.dx:
            self._give(node, self._spread(node), readers[node])
        for node in rows.sums:
            self._give(node, self.new[node], readers[node])
        self.work -= self._work(self.new[node] for node in (*rows.inside, *rows.sums))
        for node in (*reversed(inside), *(self.new[node] for node in reversed(inside))):
            if not node.users:
                graph.erase_node(node)

    def _work(self, nodes: Iterable[fx.Node]) -> int:
        """Operations of the products by expert among these."""
        return sum(int(flops(node, self.sizes)) for node in nodes if node.target in PRODUCTS)

    # ------------------------------------------------------------------------------------------- clusters, and copies
    def _cluster(self) -> None:
        rows, options = self.rows, self.options
        numbers = TensorMeta(local_tensor(rows.ids).shape, torch.int64)
        hashed = (self._laid(rows.x, dist_of(rows.x), (), rows.y), options.hashes, options.columns, _SEED)
        codes = self._call(own.hash_rows.default, hashed, numbers, rows.y)
        metas = (numbers, TensorMeta((self.few,), torch.int64), self._of_clusters(numbers))
        budget = (self.experts, 2 * options.columns, options.hashes, self.rate, self.least)
        budget += (f"#{self.outer}", self.places) if self.outer else ()
        found = self._call(own.cluster_rows.default, (codes, rows.ids, *budget), metas, rows.y)
        parts = [self._call(operator.getitem, (found, i), meta, rows.y) for i, meta in enumerate(metas)]
        self.clusters = parts[:2]
        self.new |= dict.fromkeys(rows.same_ids, parts[2])
        self._stand_in(rows.x, own.cluster_mean.default, rows.y)

    def _gradient(self) -> None:
        dy: Any = self.rows.dy
        self._stand_in(dy, own.cluster_restore_backward.default, min(dy.users))

    def _stand_in(self, rows: fx.Node, target: Any, like: fx.Node) -> None:
        meta = self._of_clusters(local_tensor(rows))
        self.exact[rows] = self._call(target, (rows, *self.clusters), meta, like)
        self.new[rows] = self._travelled(self.exact[rows], like)

    def _travelled(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """As it is behind the codec, which `exchange_tokens` lets travel between its two calls."""
        meta = local_tensor(value)
        width: Any = meta.shape[-1]
        if not self._is_packed(meta.dtype):
            return value
        if self.options.codec == "bf16":
            ways: Any = ((aten._to_copy.default, torch.bfloat16, 0, (), {"dtype": torch.bfloat16}),)
            ways += ((aten._to_copy.default, meta.dtype, 0, (), {"dtype": meta.dtype}),)
        else:
            ways = ((own.pack_rows.default, torch.uint8, 4, (), {}),)
            ways += ((own.unpack_rows.default, meta.dtype, 0, (meta.dtype,), {}),)
        for target, dtype, more, args, options in ways:
            made = TensorMeta((*meta.shape[:-1], width + more), dtype)
            value = self._call(target, (value, *args), made, like, **options)
        return value

    def _is_packed(self, dtype: torch.dtype) -> bool:
        """Whether rows travel, in more bytes than in the codec."""
        least = {"bf16": 2, "fp8": 1, None: dtype.itemsize}[self.options.codec]
        return bool(self.axis) and dtype.itemsize > least

    def _copy(self, node: fx.Node) -> None:
        """The node once more, of what stands in the place of its operands."""
        copy = self.new[node] = self.graph.node_copy(node, lambda operand: self.new.get(operand, operand))
        if node in self.rows.sums:
            return
        if node.target not in PRODUCTS:  # of which it still says how the weights lie
            copy.meta.pop("dist_in", None)
        copy.meta.pop("dist", None)
        meta = local_meta(node)
        several = tuple(m and self._of_clusters(m) for m in meta) if isinstance(meta, tuple) else None
        copy.meta["local"] = copy.meta["tensor"] = several or self._of_clusters(local_tensor(node))
        position = SIZES.get(node.target)  # type: ignore[call-overload]
        if position is not None:
            sizes: Any = copy.args[position]
            args: list[Any] = list(copy.args)
            args[position] = [self._count(copy), *(1,) * (self.rank - 1), *sizes[self.rank :]]
            copy.args = tuple(args)

    def _count(self, reader: fx.Node) -> Any:
        if isinstance(self.few, int):
            return self.few
        if self.count is None:
            with self.graph.inserting_after(self.clusters[1]):
                self.count = self.graph.call_function(aten.sym_size.int, (self.clusters[1], 0))
            self.count.meta.update(sym=self.few, fqn=fqn_of(reader), tensor=None, local=None)
        return self.count

    # ----------------------------------------------------------------------------------------------- back to the rows
    def _restored(self) -> fx.Node:
        rows = self.rows
        lies, wanted = dist_of(rows.x), dist_of(rows.y).dims[-1]
        with self.graph.inserting_before(rows.y):
            x, means = (self._laid(value, lies, wanted, rows.y) for value in (rows.x, self.exact[rows.x]))
            made = self._travelled(self.new[rows.y], rows.y)
            given = (made, x, means, *self.clusters, 1.0 / _terms(rows.y))
            return self._call(own.cluster_restore.default, given, local_tensor(rows.y), rows.y)

    def _spread(self, node: fx.Node) -> fx.Node:
        """The gradient of the rows; of several terms of it the first has that of their distance."""
        made, dy, share = self.new[node], self.rows.dy, 1.0 / _terms(node)
        few, many = self._of_clusters(local_tensor(node)), local_tensor(node)
        with self.graph.inserting_before(node):
            made = self._travelled(made, node)
            if node is not self.rows.dx[0]:
                return self._call(own.cluster_mean_backward.default, (made, *self.clusters), many, node)
            assert dy is not None
            lies, wanted = dist_of(dy), dist_of(node).dims[-1]
            dy, sums = (self._laid(value, lies, wanted, node) for value in (dy, self.exact[dy]))
            made = self._call(aten.sub.Tensor, (made, sums), few, node, alpha=share)
            spread = self._call(own.cluster_mean_backward.default, (made, *self.clusters), many, node)
            return self._call(aten.add.Tensor, (spread, dy), many, node, alpha=share)

    def _laid(self, value: fx.Node, lies: DistConfig, wanted: tuple[AxisShard, ...], like: fx.Node) -> fx.Node:
        """Rows or means, a whole or a term that is cut in width as in `lies`, as wholes that are cut as wanted. Under
        tensor parallelism rows may be cut in another way before the experts than behind them; all ranks hash wholes.
        """
        apart = ((),) * (len(lies.dims) - 1)  # what ranks have of the rows is their own
        width = tensor_of(self.rows.x).shape[-1]
        source, target = replace(lies, dims=(*apart, lies.dims[-1])), replace(lies, dims=(*apart, wanted), partial=())
        for op, args, dist in steps(source, target, (*(1,) * len(apart), width)):
            rows = local_tensor(value)
            meta = TensorMeta((*rows.shape[:-1], dist.local_shape((*(1,) * len(apart), width))[-1]), rows.dtype)
            value = self._call(op, (value, *args), meta, like)
        return value

    def _give(self, old: fx.Node, new: fx.Node, readers: Sequence[fx.Node]) -> None:
        """Let those outside read `new`, which lies as `old` does."""
        for key in ("tensor", "dist"):
            if key in old.meta:
                new.meta[key] = old.meta[key]
        inside = {*self.rows.inside, *self.rows.sums}
        for reader in readers:
            if reader not in inside:
                reader.replace_input_with(old, new)

    # ------------------------------------------------------------------------------------------------------- one call
    def _of_clusters(self, meta: TensorMeta) -> TensorMeta:
        return TensorMeta((self.few, *(1,) * (self.rank - 1), *meta.shape[self.rank :]), meta.dtype)

    def _call(self, target: Any, args: tuple[Any, ...], meta: Any, like: fx.Node, **options: Any) -> fx.Node:
        node = self.graph.call_function(target, args, options)
        for key in ("fqn", "reader", "source", "backward", "phase"):
            if key in like.meta:
                node.meta[key] = like.meta[key]
        node.meta.update(tensor=meta, local=meta)  # of a rank: clusters of several ranks are no whole
        return node


def _terms(node: fx.Node) -> int:
    """Of how many terms, one on each of as many ranks, a value is the sum."""
    dist = dist_of(node)
    return math.prod(dist.mesh.degree(axis) for axis, _ in dist.partial)

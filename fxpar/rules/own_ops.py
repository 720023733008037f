"""Rules of fxpar's own ops."""

from __future__ import annotations

from fxpar.ir.dist_config import P, R, Shard
from fxpar.rules.option import Factor, Option, OpView, Seed, TensorRef, from_factors, linear
from fxpar.rules.sub_axes import nest


def attention(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """q [B,H,S,E], k, v [B,Hkv,S,E], documents?, mask? (backward: dout, q, k, v, out, lse, ...): batch or heads.

    Heads are cut by key/value head where these divide (Megatron). Where they do not, each key/value head's *group* of
    query heads is cut instead, if it divides: query heads are sharded in Hkv sections, keys and values stay whole and
    their gradients become partial sums.
    """
    return [
        option
        for option in (_by_batch(op, degree), _by_heads(op, degree), _by_group(op, degree))
        if option is not None and _touches(option, seed, shard)
    ]


def attention_options(op: OpView, degree: int) -> list[Option]:
    """All options of attention on one axis, seeds or not (Ulysses asks for these)."""
    return [o for o in (_by_heads(op, degree), _by_group(op, degree)) if o is not None]


def narrow_attention(op: OpView, degree: int) -> Option | None:
    """The option for fewer key and value heads than ranks, as in Megatron-LM (`num_query_groups`): query heads are cut
    over all ranks, those of keys and values over an outer sub-axis with one each; all ranks of the inner one have the
    same, and a term of its gradient each. None where heads do not divide so, or need not.
    """
    _, kv_heads = _heads(op)
    if kv_heads >= degree or degree % kv_heads:
        return None
    outer = _place(op, Shard(1), Shard(1), 1)
    inner = _by_group(op.local(outer, kv_heads), degree // kv_heads)
    return nest(outer, inner, kv_heads) if inner else None


def attention_by_tokens(op: OpView) -> Option | None:
    """The option where tokens are cut between documents, so that no query has a key on another rank. Whether they are
    is not seen here: `fxpar.annotate.bins`. None where something else than documents says who sees whom.
    """
    documents, mask = _documents_and_mask(op)
    queries, keys = (op.inputs[1], op.inputs[2]) if _backward(op) else (op.inputs[0], op.inputs[1])
    if documents is None or mask is not None or queries[2] != keys[2]:
        return None
    inputs: list = [R] * len(op.inputs)
    inputs[: 6 if _backward(op) else 3] = [Shard(2)] * (6 if _backward(op) else 3)
    inputs[documents] = Shard(1)
    return Option(tuple(inputs), (Shard(2),) * len(op.outputs))


def attention_in_ring(op: OpView) -> Option | None:
    """The option where tokens are cut anywhere, so that queries have keys on other ranks: keys and values must travel.
    Documents stay whole. None where a mask says who sees whom, or keys are not those of the queries.
    """
    _, mask = _documents_and_mask(op)
    queries, keys = (op.inputs[1], op.inputs[2]) if _backward(op) else (op.inputs[0], op.inputs[1])
    if mask is not None or queries[2] != keys[2]:
        return None
    inputs: list = [R] * len(op.inputs)
    inputs[: 6 if _backward(op) else 3] = [Shard(2)] * (6 if _backward(op) else 3)
    return Option(tuple(inputs), (Shard(2),) * len(op.outputs))


def _touches(option: Option, seed: Seed, shard: Shard) -> bool:
    return option.at(seed) == shard


def _backward(op: OpView) -> bool:
    return len(op.outputs) == 3


def _documents_and_mask(op: OpView) -> tuple[int | None, int | None]:
    first = 6 if _backward(op) else 3
    documents = op.args[first] if len(op.args) > first else None
    mask = op.args[first + 1] if len(op.args) > first + 1 else None
    return (
        documents.index if isinstance(documents, TensorRef) else None,
        mask.index if isinstance(mask, TensorRef) else None,
    )


def _place(op: OpView, query: Shard, key: Shard | None, dim: int) -> Option:
    """Fill in an option: `query` for everything with query heads, `key` for keys and values (None: whole)."""
    inputs: list = [R] * len(op.inputs)
    kv = R if key is None else key
    if _backward(op):  # dout, q, k, v, out, lse
        inputs[:6] = [query, query, kv, kv, query, query]
        outputs = (query, P, P) if key is None else (query, key, key)
    else:
        inputs[:3] = [query, kv, kv]
        outputs = (query, query)
    documents, mask = _documents_and_mask(op)
    if documents is not None and dim == 0 and op.inputs[documents][0] > 1:
        inputs[documents] = Shard(0)
    if mask is not None and len(op.inputs[mask]) == 4 and op.inputs[mask][dim] > 1:
        inputs[mask] = query
    return Option(tuple(inputs), outputs)


def _heads(op: OpView) -> tuple[int, int]:
    q, k = (op.inputs[1], op.inputs[2]) if _backward(op) else (op.inputs[0], op.inputs[1])
    return q[1], k[1]


def _by_batch(op: OpView, degree: int) -> Option | None:
    return _place(op, Shard(0), Shard(0), 0) if op.inputs[0][0] % degree == 0 else None


def _by_heads(op: OpView, degree: int) -> Option | None:
    return _place(op, Shard(1), Shard(1), 1) if _heads(op)[1] % degree == 0 else None


def _by_group(op: OpView, degree: int) -> Option | None:
    heads, kv_heads = _heads(op)
    if kv_heads % degree == 0 or (heads // kv_heads) % degree:
        return None
    query = Shard(1, (1,) * kv_heads if kv_heads > 1 else ())
    return _place(op, query, None, 1)


def cross_entropy(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """(logits [N, V], target [N], class_ids [V]) -> (lse [N], picked [N]): rows, or classes without a gather."""
    factors = [Factor((0, 0, None), (0, 0)), Factor((1, None, 0), ("logsumexp", "sum"), sections=False)]
    return from_factors(factors, op, degree, seed, shard)


def cross_entropy_backward(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """(dlse [N], dpicked [N], logits [N, V], target [N], class_ids [V], lse [N]) -> dlogits [N, V]."""
    factors = [
        Factor((0, 0, 0, 0, None, 0), (0,)),
        Factor((None, None, 1, None, 0, None), (1,), sections=False),
    ]
    return from_factors(factors, op, degree, seed, shard)


def dropout(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """(x, seed, offsets of dim 0, 1, ...) -> like x: the offsets of a sharded dim are sharded with it."""
    rank = len(op.inputs[0])
    factors = []
    for d in range(rank):
        offsets = tuple(0 if i == d else None for i in range(rank))
        factors.append(Factor((d, None, *offsets), (d,)))
    return from_factors(factors, op, degree, seed, shard)


def embedding(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """(weight [V, D], ids [...], row_ids [V]) -> [..., D]; cutting V gives partial sums (zeros for absent rows)."""
    rank = len(op.inputs[1])
    factors = [
        Factor((0, None, 0), ("sum",), sections=False),
        Factor((1, None, None), (rank,)),
        *(Factor((None, d, None), (d,)) for d in range(rank)),
    ]
    return from_factors(factors, op, degree, seed, shard)


def embedding_backward(op: OpView, degree: int, seed: Seed, shard: Shard) -> list[Option]:
    """(grad [..., D], ids [...], row_ids [V]) -> dweight [V, D].

    Linear in grad, but a partial grad is not offered: with a small vocabulary it would move the reduction from the
    activations of the first layer to the table, and no two models' graphs would look alike.
    """
    rank = len(op.inputs[1])
    factors = [
        Factor((None, None, 0), (0,), sections=False),
        Factor((rank, None, None), (1,)),
        *(Factor((d, d, None), ("sum",)) for d in range(rank)),
    ]
    return from_factors(factors, op, degree, seed, shard)


def expert_mm_factors(op: OpView) -> list[Factor]:
    """(x [..., D], weight [E, D, F], ids [...]) -> [..., F]: rows, columns of the weights, and a sum over D."""
    rank = len(op.inputs[2])
    rows = [Factor((d, None, d), (d,)) for d in range(rank)]
    return [*rows, Factor((None, 2, None), (rank,)), Factor((rank, 1, None), ("sum",))]


def expert_mm_backward_factors(op: OpView) -> list[Factor]:
    """(grad [..., F], x [..., D], ids [...]) -> dweight [E, D, F]: a sum over rows, and both dims of the weights."""
    rank = len(op.inputs[2])
    rows = [Factor((d, d, d), ("sum",)) for d in range(rank)]
    return [*rows, Factor((None, rank, None), (1,)), Factor((rank, None, None), (2,))]


def first_two(op: OpView) -> list[Option]:
    """Linear in each of the first two operands."""
    return [linear(op, position) for position in (0, 1)]


def weighted_sum_factors(op: OpView) -> list[Factor]:
    """(rows [N, K, D], weights [N, K]) -> [N, D]."""
    return [Factor((0, 0), (0,)), Factor((2, None), (1,)), Factor((1, 1), ("sum",))]


def weighted_sum_partials(op: OpView) -> list[Option]:
    """A sum of terms is K times smaller behind it than before."""
    return [linear(op, 0)]


def weighted_sum_backward_factors(op: OpView) -> list[Factor]:
    """(grad [N, D], rows [N, K, D], weights [N, K]) -> (drows, dweights)."""
    return [Factor((0, 0, 0), (0, 0)), Factor((1, 2, None), (2, "sum")), Factor((None, 1, 1), (1, 1))]


def weighted_sum_backward_partials(op: OpView) -> list[Option]:
    """The gradient of rows does not depend on rows, that of the weights is linear in them."""
    return [Option((R, P, R), (R, P))]

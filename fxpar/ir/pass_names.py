"""Which passes there are, by name, and their order in the lowering. Nothing here imports torch."""

from __future__ import annotations

from fxpar.errors import UnknownPassError
from fxpar.ir.registry import Registry

BUILTIN: dict[str, str] = {
    "accumulate_gradients": "fxpar.passes.accumulate_gradients:AccumulateGradients",
    "annotate": "fxpar.annotate.driver:Annotate",
    "bucket_collectives": "fxpar.passes.bucket_collectives:BucketCollectives",
    "casts": "fxpar.passes.casts:Casts",
    "chunk_experts": "fxpar.passes.chunk_experts:ChunkExperts",
    "chunk_loss": "fxpar.passes.chunk_loss:ChunkLoss",
    "compress_dispatch": "fxpar.passes.compress_dispatch:CompressDispatch",
    "cleanup": "fxpar.passes.cleanup:Cleanup",
    "exchange_tokens": "fxpar.passes.exchange_tokens:ExchangeTokens",
    "global_to_local": "fxpar.passes.global_to_local:GlobalToLocal",
    "hide_reductions": "fxpar.passes.hide_reductions:HideReductions",
    "hoist_collectives": "fxpar.passes.hoist_collectives:HoistCollectives",
    "insert_reshards": "fxpar.passes.insert_reshards:InsertReshards",
    "lower_collectives": "fxpar.passes.lower_collectives:LowerCollectives",
    "limit_experts": "fxpar.passes.limit_experts:LimitExperts",
    "mask_padding": "fxpar.passes.mask_padding:MaskPadding",
    "narrow_gradients": "fxpar.passes.narrow_gradients:NarrowGradients",
    "offload": "fxpar.passes.offload:Offload",
    "prefetch_gathers": "fxpar.passes.prefetch_gathers:PrefetchGathers",
    "reduce_gradients": "fxpar.passes.reduce_gradients:ReduceGradients",
    "ring_attention": "fxpar.passes.ring_attention:RingAttention",
    "rematerialize": "fxpar.passes.rematerialize:Rematerialize",
    "reshard_to_collectives": "fxpar.passes.reshard_to_collectives:ReshardToCollectives",
    "reuse_buffers": "fxpar.passes.reuse_buffers:ReuseBuffers",
    "share_weights": "fxpar.passes.share_weights:ShareWeights",
    "sink_waits": "fxpar.passes.sink_waits:SinkWaits",
    "sort_rows": "fxpar.passes.sort_rows:SortRows",
    "write_in_place": "fxpar.passes.write_in_place:WriteInPlace",
    "zero_shard": "fxpar.passes.zero_shard:ZeroShard",
}
"""Name -> `module:attribute` of the passes that come with fxpar."""

PASSES = Registry("pass", "fxpar.passes", BUILTIN, UnknownPassError)

LADDER = (
    "annotate",
    "insert_reshards",
    "zero_shard",
    "casts",
    "reduce_gradients",
    "reshard_to_collectives",
    "mask_padding",
    "cleanup",
    "global_to_local",
    "ring_attention",
    "limit_experts",
    "compress_dispatch",
    "chunk_experts",
    "exchange_tokens",
    "sort_rows",
    "lower_collectives",
    "chunk_loss",
    "rematerialize",
    "bucket_collectives",
    "hoist_collectives",
    "reuse_buffers",
    "sink_waits",
    "prefetch_gathers",
    "hide_reductions",
    "offload",
    "write_in_place",
)
"""The names of `fxpar.lowering.default_passes()`, in order."""

SHARING = "share_weights"
"""The pass that lays out the weights of all strategies, behind the ladder of each."""

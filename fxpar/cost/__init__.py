"""What things cost; whoever weighs one thing against another asks here."""

from fxpar.cost.ops import ATTENTION, PRODUCTS, SizesAt, flops, is_kernel, local_metas, touched_bytes

__all__ = ["ATTENTION", "PRODUCTS", "SizesAt", "flops", "is_kernel", "local_metas", "touched_bytes"]

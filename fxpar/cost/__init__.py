"""What things cost; whoever weighs one thing against another asks here."""

from fxpar.cost.ops import (
    ATTENTION,
    PRODUCTS,
    Shape,
    SizesAt,
    SizesOf,
    flops,
    is_kernel,
    tensor_metas_of,
    touched_bytes,
)

__all__ = [
    "ATTENTION",
    "PRODUCTS",
    "Shape",
    "SizesAt",
    "SizesOf",
    "flops",
    "is_kernel",
    "tensor_metas_of",
    "touched_bytes",
]

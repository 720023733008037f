import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxpar.runtime.forked import run_forked
from fxpar.torch_api.inductor import compile_whole


@pytest.mark.nightly
def test_a_fused_kernel_reads_a_collective_after_its_wait():
    """It did not in torch 2.13: the kernel of `where`, fused with that of the mask, ran before the wait."""

    def work(rank: int) -> float:
        collectives = torch.ops._c10d_functional
        name = dist.new_group([0, 1]).group_name

        def function(x: Tensor, weight: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            mask = x[..., 0] > 0
            whole = x + collectives.wait_tensor(collectives.all_reduce(x @ weight, "sum", name))
            scaled = torch.sigmoid(gate) * scale.exp()
            turned = torch.where(mask.unsqueeze(-1), whole, -whole) * scaled
            return whole, turned @ weight, mask, scaled

        torch.manual_seed(0)
        operands = [torch.randn(size, dtype=torch.float64) for size in [(47, 16), (16, 16), (16,), ()]]
        with torch.compiler.config.patch(force_disable_caches=True):
            run = function if rank else compile_whole(function)  # one compilation is enough
            run(*operands)
            time.sleep(0.3 * rank)  # who is first reads what the other has not sent
            found, right = run(*operands), function(*operands)
        return max((a.double() - b.double()).abs().max().item() for a, b in zip(found, right, strict=True))

    assert max(run_forked(2, work)) < 1e-12

"""The smallest kernel in which racecheck reports what it reports in ours; its result is right.

    compute-sanitizer --tool racecheck --racecheck-report all python benchmarks/racecheck_gpu.py

docs/performance.md says what the reports are.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooftile.kernels.triton_version import tma_load


@gluon.jit
def load(desc, tile, full):
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, [0, 0], full, tile)


@gluon.jit
def store(tile, full, out):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    mbarrier.wait(full, 0)
    gl.store(out + row * 64 + column, tile.load(L))


@gluon.jit
def copy(desc, out):
    """One role copies a tile into shared memory, the other waits for it and stores it."""
    tile = gl.allocate_shared_memory(desc.dtype, [64, 64], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    gl.warp_specialize([(store, (tile, full, out)), (load, (desc, tile, full))], [1], [24])


if __name__ == "__main__":
    x = torch.randn(64, 64, device="cuda").bfloat16()
    out = torch.zeros_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    copy[(1,)](TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout), out, num_warps=4)
    print("equal" if torch.equal(x, out) else "different")

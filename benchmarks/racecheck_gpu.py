"""Small kernels in which racecheck reports what it reports in ours; their results are right.

    compute-sanitizer --tool racecheck --racecheck-report all python benchmarks/racecheck_gpu.py

docs/performance.md says what the reports are, and that they come and go.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooftile.kernels.triton_version import tma_load


@gluon.jit
def load(desc, tile, full, empty, tiles, reuse: gl.constexpr):
    for i in range(tiles):
        if reuse:
            mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, [i * 64, 0], full, tile)


@gluon.jit
def store(tile, full, empty, out, tiles, reuse: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    for i in range(tiles):
        mbarrier.wait(full, i & 1)
        x = tile.load(L)
        if reuse:
            mbarrier.arrive(empty, count=1)
        gl.store(out + (i * 64 + row) * 64 + column, x)


@gluon.jit
def copy(desc, out, tiles, reuse: gl.constexpr):
    """One role copies tiles into shared memory, the other waits for each and stores it."""
    tile = gl.allocate_shared_memory(desc.dtype, [64, 64], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (store, (tile, full, empty, out, tiles, reuse)),
            (load, (desc, tile, full, empty, tiles, reuse)),
        ],
        [1],
        [24],
    )


if __name__ == "__main__":
    for tiles in (1, 4):  # one tile is not used again
        x = torch.randn(64 * tiles, 64, device="cuda").bfloat16()
        out = torch.zeros_like(x)
        layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
        desc = TensorDescriptor(x, [64 * tiles, 64], [64, 1], [64, 64], layout)
        copy[(1,)](desc, out, tiles, tiles > 1, num_warps=4)
        print(tiles, "equal" if torch.equal(x, out) else "different")

"""Kernels that touch memory outside of a tensor: python -m tests.kernels.guarded_faults SIDE FAULT.

A process of its own for each, since a GPU's context does not survive the error.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooftile.kernels.triton_version import tma_load
from tests.support import guarded_memory

ROWS = 40  # of 64 elements, not a whole number of tiles


@triton.jit
def touch(address, out, first, stores: tl.constexpr):
    place = address.to(tl.pointer_type(tl.bfloat16)) + first + tl.arange(0, 8)
    if stores:
        tl.store(place, 1.0)
    else:
        tl.store(out + tl.arange(0, 8), tl.load(place))


@gluon.jit
def copy(desc, out):
    """The first 64 rows by the copy engine."""
    tile = gl.allocate_shared_memory(desc.dtype, [64, 64], desc.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    fence_async_shared()
    mbarrier.expect(barrier, desc.block_type.nbytes)
    tma_load(desc, [0, 0], barrier, tile)
    mbarrier.wait(barrier, 0)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, L)), 0)
    gl.store(out + row * 64 + column, tile.load(L))


def copied(x: torch.Tensor, rows: int) -> None:
    """rows: that the copy engine is told x has."""
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    desc = TensorDescriptor(x, [rows, 64], [64, 1], [64, 64], layout)
    out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    copy[(1,)](desc, out, num_warps=4)
    torch.cuda.synchronize()
    assert torch.equal(out[:ROWS], x)
    assert not bool(out[rows:].any())  # which the copy engine fills with zeros


def main(side: guarded_memory.Side, fault: str) -> None:
    guarded_memory.install(side)
    assert bool(torch.empty(100, device="cuda").isnan().all())
    x = torch.randn(ROWS, 64, device="cuda").bfloat16()
    out = torch.zeros(8, device="cuda", dtype=torch.bfloat16)
    n, at = x.numel(), x.data_ptr()
    touch[(1,)](at, out, n - 8, False)
    touch[(1,)](at, out, 0, False)
    torch.cuda.synchronize()
    assert torch.equal(out, x.flatten()[:8])
    copied(x, ROWS)
    print("inside", flush=True)
    if fault == "after free":
        del x
        touch[(1,)](at, out, 0, False)
    elif fault.startswith("copy"):
        copied(x, 64)
    elif fault != "none":
        where, how = fault.split()
        touch[(1,)](at, out, n if where == "behind" else -8, how == "store")
    torch.cuda.synchronize()
    print("not noticed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]

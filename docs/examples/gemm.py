"""C = A B^T on a Hopper GPU, in bfloat16: the code of docs/tutorial_gemm.md."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.launch import Launch, multiprocessors
from rooftile.kernels.gluon.tile.matrix import describe_matrix
from rooftile.kernels.gluon.tile.mma import accumulator_layout, multiply, wait
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Ring, new_ring
from rooftile.kernels.gluon.tile.template import load_compute_finish
from rooftile.kernels.triton_version import tma_store, tma_store_wait


@record
class Gemm:
    num_tiles: gl.tensor
    columns: gl.tensor  # tiles of 128 columns
    num_steps: gl.tensor  # of 64 along K
    a: Ring  # boxes of 128 rows, 64 along K
    ring: Ring  # the same of B
    out: gl.shared_memory_descriptor  # [2, 64, 128]

    @gluon.jit
    def steps(self, t):
        return self.num_steps

    @gluon.jit
    def load(self, descs, turn, fill, t, i):
        self.a.acquire(fill)
        self.a.load(fill, descs[0], [t // self.columns * 128, i * 64])
        self.ring.acquire(fill)
        self.ring.load(fill, descs[1], [t % self.columns * 128, i * 64])

    @gluon.jit
    def start(self, t, group: gl.constexpr):
        return gl.zeros([64, 128], gl.float32, accumulator_layout(128))

    @gluon.jit
    def compute(self, acc, turn, fill, t, i, group: gl.constexpr):
        self.a.arrived(fill)
        self.ring.arrived(fill)
        a, b = self.a.tile(fill).slice(group * 64, 64, 0), self.ring.tile(fill)
        acc = multiply(a, b.permute((1, 0)), acc)
        acc = wait(0, deps=[acc])
        self.a.release(fill)
        self.ring.release(fill)
        return acc

    @gluon.jit
    def finish(self, acc, descs, turn, t, group: gl.constexpr):
        out = self.out.index(group)
        tma_store_wait(0)
        out.store(acc.to(gl.bfloat16))
        fence_async_shared()
        tma_store(descs[2], [t // self.columns * 128 + group * 64, t % self.columns * 128], out)


@gluon.jit(do_not_specialize=["num_tiles", "columns", "num_steps"])
def gemm_kernel(a_desc, b_desc, c_desc, num_tiles, columns, num_steps, stages: gl.constexpr):
    a, b = new_ring(a_desc, 128, 64, stages, 2), new_ring(b_desc, 128, 64, stages, 2)
    out = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], c_desc.layout)
    work = Gemm(num_tiles, columns, num_steps, a, b, out)
    load_compute_finish(work, (a_desc, b_desc, c_desc), 2, 232)


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # [m, k], [n, k] -> [m, n]
    (m, k), n = a.shape, b.shape[0]
    c = a.new_empty(m, n)
    columns, tiles = -(-n // 128), -(-m // 128) * -(-n // 128)
    boxes = [describe_matrix(*x) for x in ((a, 128, 64), (b, 128, 64), (c, 64, 128))]
    numbers = (tiles, columns, -(-k // 64))
    ctas = min(tiles, multiprocessors(a.device))
    kind = (gemm_kernel, ctas, a.device, a.dtype, tuple(boxes), numbers, (("stages", 4),))
    Launch(*kind)((a, b, c), ())
    return c

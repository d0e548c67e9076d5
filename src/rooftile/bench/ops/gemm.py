"""The suite of `matmul`: products by their m x n x k, weights stored [n, k], and torch beside.

The oracle is float64 on rows drawn from the product itself, at its full size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.ops.suite import Problem, Run, Suite, WrongResult, check_peers, families_of
from rooftile.ops.gemm import MATMUL, matmul, matmul_call
from rooftile.planning.roofline import linear_work
from rooftile.planning.stream_k import Product, product_of

PEERS = ("torch",)  # cuBLAS on a GPU, oneDNN or MKL on a CPU
CHECKED_ROWS = 64


def _drawn(count: int, seed: int, multiple: int) -> tuple[str, ...]:
    """Products with sizes log-uniform in 64..8192, each a multiple of `multiple`."""
    draw = random.Random(seed)

    def size() -> int:
        value = int(math.exp(draw.uniform(math.log(64), math.log(8192))))
        return max(value // multiple, 1) * multiple

    return tuple(f"{size()}x{size()}x{size()}" for _ in range(count))


GROUPS: dict[str, tuple[str, ...]] = {
    "forward": (
        *("8192x8192x8192", "4096x4096x4096", "2048x2048x2048", "1024x1024x1024"),
        *("512x4096x14336", "256x4096x14336", "128x4096x14336", "64x4096x14336"),
        *("16x4096x14336", "16x28672x4096", "64x6144x4096", "256x6144x4096", "1x4096x4096"),
        *("1536x1536x8192", "1792x2304x4096", "2176x2176x4096", "3072x3072x3072"),
        *("384x384x16384", "128x128x32768", "640x1280x16384", "4352x2304x2048"),
        *("1000x1000x1000", "2500x2500x2500", "5000x3000x700"),
    ),
    "decode": tuple(  # the layers of Llama-3.1-8B and of Qwen3-0.6B
        f"{m}x{n}x{k}"
        for n, k in (
            *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
            *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
        )
        for m in (1, 16, 64)
    ),
    "aligned": _drawn(100, 11, 8),
    "misaligned": _drawn(100, 12, 1),
    "waves": tuple(f"{128 * tiles}x128x4096" for tiles in (*range(8, 400, 8),)),
    "cpu": ("512x576x3072", "32x1536x576", "256x256x256"),
}


def inputs(product: Product, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a [m, k] and b [k, n], the transpose of weights stored [n, k]."""
    generator = torch.Generator(device).manual_seed(0)
    a, weight = (
        torch.randn(rows, product.k, generator=generator, device=device).to(dtype)
        for rows in (product.m, product.n)
    )
    return a, weight.T


def make(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[str] | None,
    peers: Sequence[str],
) -> Problem:
    """`kernels` None: every family of ours that supports the call, the reference only on a CPU."""
    product = product_of(name)
    a, b = inputs(product, device, dtype)
    call = matmul_call(a, b)
    # torch's product is a peer, by its own name; on a CPU it is what kernel="auto" takes.
    left_out = () if device.type == "cpu" and "torch" not in peers else ("torch",)
    families = families_of(MATMUL, call, device, kernels, left_out)
    check_peers("matmul", peers, PEERS)
    runs: dict[str, Run] = {family: _ours(a, b, family) for family in families}
    others: dict[str, Run] = {peer: lambda: torch.mm(a, b) for peer in peers}
    work = linear_work(product.m, product.k, product.n, dtype.itemsize)
    return Problem(str(product), work, runs, others, {}, checker(str(product), a, b))


SUITE = Suite("gemm", GROUPS, gpu=("forward",), cpu=("cpu",), peers=PEERS, make=make)


def _ours(a: Tensor, b: Tensor, family: str) -> Run:
    return lambda: matmul(a, b, kernel=family)


def checker(name: str, a: Tensor, b: Tensor) -> Callable[[Any], float]:
    """Error of a result on drawn rows: norm of the difference over the norm of the oracle."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(a.shape[0], (min(CHECKED_ROWS, a.shape[0]),), generator=generator)
    rows = torch.cat([torch.tensor([0, a.shape[0] - 1]), drawn]).unique().to(a.device)
    exact = a[rows].double() @ b.double()

    def check(out: Any) -> float:
        off = (out[rows].double() - exact).abs()
        allowed = 4 * torch.finfo(a.dtype).eps * exact.abs().amax(-1, keepdim=True)
        if not bool((off <= allowed).all()):
            raise WrongResult(
                f"{name} is off by {float(off.nan_to_num(nan=torch.inf).max()):.2g}, allowed "
                f"{float(allowed.max()):.2g}"
            )
        return float(off.norm() / exact.norm().clamp_min(1e-300))

    return check

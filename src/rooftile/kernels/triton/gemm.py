"""Stream-K matrix products in portable Triton (Osama et al. 2023, arXiv 2301.03598).

Runs on every GPU that Triton supports, with pointer loads only, and in Triton's interpreter on a
CPU (TRITON_INTERPRET=1 before the import; float16 and float32). planning/stream_k.py says who computes what:
a program walks its piece of the line of steps from its last tile to its first, publishes its part
of a tile that a later program finishes, and waits for parts of programs before it only.
"""
# mypy: disable-error-code="no-untyped-def"

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.flags import discard_flags, flags
from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.torch.gemm import efficiency as vendor_efficiency
from rooftile.kernels.triton.interpreter import INTERPRETED
from rooftile.planning.stream_k import Decomposition, Product, Tiling, hybrid

_INTERPRETED_CTAS = 3
FP8 = torch.float8_e4m3fn


@triton.jit
def _bound(cta, group_ctas, group_steps):
    """Where on the line the piece of a program begins."""
    return cta // group_ctas * group_steps + cta % group_ctas * group_steps // group_ctas


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def activate(x, activation: tl.constexpr):
    if activation == "silu":
        return x * _sigmoid(x)
    elif activation == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif activation == "gelu_tanh":
        # 0.5 x (1 + tanh y) is x sigmoid(2 y)
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return x


@triton.jit
def _before_activation(
    acc, bias, scale_a, scale_b, rows, columns, m, end, scale_a_stride, scale_b_stride,
    has_bias: tl.constexpr, has_scales: tl.constexpr,
):  # fmt: skip
    inside = columns < end
    if has_scales:
        by_row = tl.load(scale_a + rows * scale_a_stride, mask=rows < m, other=0.0)
        by_column = tl.load(scale_b + columns * scale_b_stride, mask=inside, other=0.0)
        acc = acc * by_row[:, None] * by_column[None, :]
    if has_bias:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _multiply(
    a, b, m, n_end, k, row0, column0, first, last, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Steps first .. last - 1 along K of one tile, [block_m, block_n] float32."""
    rows = row0 + tl.arange(0, block_m)
    columns = column0 + tl.arange(0, block_n)
    step = tl.arange(0, block_k)
    a_at = a + rows[:, None].to(tl.int64) * a_stride_m
    b_at = b + columns[None, :].to(tl.int64) * b_stride_n
    acc = tl.zeros([block_m, block_n], tl.float32)
    for i in tl.range(first, last):
        ks = i * block_k + step
        a_mask = (rows < m)[:, None] & (ks < k)[None, :]
        b_mask = (columns < n_end)[None, :] & (ks < k)[:, None]
        wide_ks = ks.to(tl.int64)
        a_tile = tl.load(a_at + wide_ks[None, :] * a_stride_k, mask=a_mask, other=0.0)
        b_tile = tl.load(b_at + wide_ks[:, None] * b_stride_k, mask=b_mask, other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=precision)
    return acc


_UNSPECIALISED = ["m", "n", "k", "num_tiles", "tiles_m", "tiles_n", "iterations", "stream_tiles",
                  "group_ctas", "group_steps"]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALISED)
def matmul_kernel(
    a,
    b,
    out,
    bias,
    residual,
    scale_a,
    scale_b,
    parts,  # pointer to float32, [programs, 1 or 2 with a gate, block_m, block_n]
    flags,  # pointer to int32, [programs]: the program's part is there
    m,
    n,
    k,
    a_stride_m,
    a_stride_k,
    b_stride_k,
    b_stride_n,
    out_stride,
    residual_stride,
    residual_column_stride,
    scale_a_stride,
    scale_b_stride,
    num_tiles,
    tiles_m,
    tiles_n,
    iterations,
    stream_tiles,
    group_ctas,
    group_steps,
    block_m: tl.constexpr,
    block_n: tl.constexpr,  # columns of the result
    block_k: tl.constexpr,
    band: tl.constexpr,  # rows of tiles that are walked together, for the L2 cache
    gated: tl.constexpr,
    activation: tl.constexpr,  # of the gate, if there is one
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    has_scales: tl.constexpr,
    precision: tl.constexpr,
):
    cta = tl.program_id(0)
    begin = _bound(cta, group_ctas, group_steps)
    end = _bound(cta + 1, group_ctas, group_steps)
    whole = stream_tiles + cta
    accs: tl.constexpr = 2 if gated else 1
    size: tl.constexpr = block_m * block_n
    out_n = n // accs
    in_tile = tl.arange(0, block_m)[:, None] * block_n + tl.arange(0, block_n)[None, :]
    while (end > begin) | (whole < num_tiles):
        if end > begin:
            tile = (end - 1) // iterations
            first = tl.maximum(begin - tile * iterations, 0)
            last = end - tile * iterations
            end = tile * iterations + first
        else:
            tile = whole
            first = 0
            last = iterations
            whole += tl.num_programs(0)
        top = tile // (band * tiles_n) * band
        height = tl.minimum(tiles_m - top, band)
        within = tile % (band * tiles_n)
        row0 = (top + within % height) * block_m
        column0 = within // height * block_n
        acc = _multiply(
            a, b, m, out_n, k, row0, column0, first, last, a_stride_m, a_stride_k, b_stride_k,
            b_stride_n, block_m, block_n, block_k, precision,
        )  # fmt: skip
        value = acc
        if gated:
            value = _multiply(
                a, b, m, n, k, row0, column0 + out_n, first, last, a_stride_m, a_stride_k,
                b_stride_k, b_stride_n, block_m, block_n, block_k, precision,
            )  # fmt: skip
        if last < iterations:
            part = parts + cta.to(tl.int64) * (accs * size) + in_tile
            tl.store(part, acc)
            if gated:
                tl.store(part + size, value)
            tl.debug_barrier()
            tl.atomic_xchg(flags + cta, 1, sem="release")
        else:
            start = tile * iterations
            edge = start + first
            other = cta
            while edge > start:  # the parts before mine, backwards along K
                other -= 1
                while tl.atomic_add(flags + other, 0, sem="acquire") == 0:
                    pass
                part = parts + other.to(tl.int64) * (accs * size) + in_tile
                acc += tl.load(part)
                if gated:
                    value += tl.load(part + size)
                tl.debug_barrier()
                tl.store(flags + other, 0)
                edge = _bound(other, group_ctas, group_steps)
            rows = row0 + tl.arange(0, block_m)
            columns = column0 + tl.arange(0, block_n)
            acc = _before_activation(
                acc, bias, scale_a, scale_b, rows, columns, m, out_n, scale_a_stride,
                scale_b_stride, has_bias, has_scales,
            )  # fmt: skip
            acc = activate(acc, activation)
            if gated:
                value = _before_activation(
                    value, bias, scale_a, scale_b, rows, columns + out_n, m, n, scale_a_stride,
                    scale_b_stride, has_bias, has_scales,
                )  # fmt: skip
                acc = acc * value
            inside = (rows < m)[:, None] & (columns < out_n)[None, :]
            wide_rows = rows[:, None].to(tl.int64)
            if has_residual:
                at = residual + wide_rows * residual_stride
                at += columns[None, :] * residual_column_stride
                acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            at = out + wide_rows * out_stride + columns[None, :]
            tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def matmul(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n]
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    batch_invariant: bool,
    plan: Decomposition | None = None,
) -> Tensor:
    m, k = a.shape
    n = b.shape[1]
    gated = reference.is_gated(activation)
    if not m * n * k:
        return reference.matmul(
            a, b, bias, residual, scale_a, scale_b, activation, out_dtype, batch_invariant
        )
    out = a.new_empty((m, n // 2 if gated else n), dtype=out_dtype)
    plan = plan or _plan(m, out.shape[1], k, a.device, batch_invariant)
    tiling = plan.tiling
    size = tiling.block_m * tiling.block_n * (2 if gated else 1)
    parts = out.new_empty(plan.num_ctas * size if plan.stream_tiles else 1, dtype=torch.float32)
    wide = tiling.block_m * tiling.block_n >= 128 * 128
    try:
        matmul_kernel[(plan.num_ctas,)](
            *(a, b, out),
            out if bias is None else bias,
            out if residual is None else residual,
            parts if scale_a is None else scale_a,
            parts if scale_b is None else scale_b,
            *(parts, flags(a.device), m, n, k, *a.stride(), *b.stride(), out.stride(0)),
            *((0, 0) if residual is None else residual.stride()),
            *(int(x is not None and x.dim() > 0) for x in (scale_a, scale_b)),
            plan.tiles,
            -(-m // tiling.block_m),
            -(-out.shape[1] // tiling.block_n),
            *(plan.iterations, plan.stream_tiles, plan.group_ctas),
            plan.group_tiles * plan.iterations,
            block_m=tiling.block_m,
            block_n=tiling.block_n,
            block_k=tiling.block_k,
            band=8,
            gated=gated,
            activation=activation.removesuffix("_and_mul"),
            has_bias=bias is not None,
            has_residual=residual is not None,
            has_scales=scale_a is not None,
            precision="ieee" if a.dtype == torch.float32 else "tf32",
            num_warps=8 if wide else 4,
            num_stages=3,
        )
    except BaseException:
        discard_flags(a.device)
        raise
    return out


@lru_cache(maxsize=4096)
def _plan(m: int, n: int, k: int, device: torch.device, batch_invariant: bool) -> Decomposition:
    if INTERPRETED:
        ctas = _INTERPRETED_CTAS
    else:
        ctas = torch.cuda.get_device_properties(device).multi_processor_count
    if batch_invariant:  # whole tiles of one shape, whatever m
        tiling = Tiling(64, 128, 64)
        tiles = tiling.tiles(Product(m, n, k))
        return Decomposition("data-parallel", Product(m, n, k), tiling, min(tiles, ctas))
    block_m = 128 if m > 64 else max(16, 1 << (m - 1).bit_length())
    tiling = Tiling(block_m, 128 if m > 64 else 64, 64)
    return hybrid(Product(m, n, k), tiling, ctas)


def efficiency(call: Any) -> float:
    """About half of what the vendor's library reaches on the same call."""
    return 0.5 * vendor_efficiency(call)


def supports(call: Any) -> str | None:
    if call.b_layout == "int4_words":
        return "it reads dense weights, not int4 codes"
    if INTERPRETED and call.dtype in (torch.float16, torch.float32) and call.device == "cpu":
        pass
    elif INTERPRETED:
        return f"Triton's interpreter takes float16 and float32 on a CPU, not {call.dtype}"
    elif call.device != "cuda":
        return f"it needs a GPU, not a {call.device}"
    elif call.dtype not in (torch.bfloat16, torch.float16, torch.float32, FP8):
        return f"it takes float32, bfloat16, float16 and float8_e4m3fn, not {call.dtype}"
    if call.out_dtype == torch.float64:
        return "it sums in float32, and float64 was asked for"
    return None


KERNELS = {"matmul": Kernel(matmul, supports, efficiency)}

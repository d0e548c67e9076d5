"""From the operator's arguments to a launch."""

from __future__ import annotations

from functools import cache, lru_cache
from math import gcd
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from rooftile.kernels.flags import discard_flags, flags
from rooftile.kernels.gluon.gemm import codes_forward, direct_forward, few_forward
from rooftile.kernels.gluon.gemm.choice import AnyPlan, Operands, choose
from rooftile.kernels.gluon.gemm.codes_plan import plan_of_row
from rooftile.kernels.gluon.gemm.config import constants
from rooftile.kernels.gluon.gemm.direct_plan import plan_of_codes
from rooftile.kernels.gluon.gemm.few_plan import FewRowsPlan, PortablePlan
from rooftile.kernels.gluon.gemm.kernel import matmul_kernel
from rooftile.kernels.gluon.gemm.pad import padded
from rooftile.kernels.gluon.gemm.plan import Plan
from rooftile.kernels.gluon.gemm.sums import add_parts
from rooftile.kernels.gluon.gemm.tile_plan import UNIT, TilePlan, row_unit
from rooftile.kernels.gluon.launch import Box, Launch, multiprocessors
from rooftile.kernels.reference import gemm as reference
from rooftile.kernels.weights_at_rest import are_weights_at_rest
from rooftile.planning.hardware import H200
from rooftile.planning.roofline import least_time, linear_work
from rooftile.planning.stream_k_cost import LINE_BYTES, row_alignment
from rooftile.planning.vendor_cost import MARGIN

FP8 = torch.float8_e4m3fn
_PART_COLUMNS = 4  # multiples of 16 bytes
_TMA_BYTES = 16  # multiples that the copy engine can address
_MOST_K = 2**20  # two waves of tiles, times the CTAs, times the steps of a tile stay below 2^30
_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    FP8: gl.float8e4nv,
}


def matmul(
    a: Tensor,  # [m, k]
    b: Tensor,  # [k, n], or words of int4 codes, [k / 8, n]
    bias: Tensor | None,
    residual: Tensor | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
    batch_invariant: bool,
    plan: AnyPlan | None = None,
) -> Tensor:
    m, k = a.shape
    n = b.shape[1]
    gated = reference.is_gated(activation)
    if not m * n * k:
        return reference.matmul(
            a, b, bias, residual, scale_a, scale_b, activation, out_dtype, batch_invariant
        )
    if b.dtype == torch.int32:
        a = a if a.stride(1) == 1 else a.contiguous()
        assert scale_b is not None
        operands = (a, b.T, scale_b, bias, residual, activation, out_dtype)
        # One row is multiplied before weights are rounded, so its bits are not those among others.
        addressed = b.data_ptr() % _TMA_BYTES == scale_b.data_ptr() % _TMA_BYTES == 0
        alone = m == 1 and row_unit(a) == UNIT and addressed
        row_plan = plan_of_row(n, k) if alone and not batch_invariant else None
        if row_plan is not None:
            return codes_forward.matmul(*operands, row_plan)
        return direct_forward.matmul(*operands, plan_of_codes(m, n))
    if plan is None:
        bare = activation == "none" and residual is None and out_dtype == a.dtype
        plan = _choose(a, b, scale_a is not None, gated, bare, batch_invariant)
    if isinstance(plan, FewRowsPlan):
        return few_forward.matmul(a, b.T, bias, residual, activation, out_dtype, plan)
    if isinstance(plan, PortablePlan):
        from rooftile.kernels.triton.linear import few_rows

        return few_rows(a, b.T, bias)
    if isinstance(plan, TilePlan):
        # Plain Triton, which what simulates this module's kernels does not know.
        from rooftile.kernels.triton import gemm_tiles

        return gemm_tiles.matmul(a, b.T, bias, residual, activation, out_dtype, plan)
    if plan.apart and (gated or scale_a is not None):
        plan = plan.joined
    out = a.new_empty((m, n // 2 if gated else n), dtype=out_dtype)
    given = b
    (a, a_by_rows), (b, b_by_rows) = _operands(a, b)
    may_rest = b is given and not plan.transposed
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    if plan.transposed:
        (a, a_by_rows), (b, b_by_rows) = (b.T, not b_by_rows), (a.T, not a_by_rows)
    if plan.apart:
        columns = -(-n // _PART_COLUMNS) * _PART_COLUMNS
        parts = torch.empty(
            (plan.group_ctas, plan.part_rows, columns), dtype=torch.float32, device=a.device
        )
        _run(plan, (a, a_by_rows), (b, b_by_rows), parts.flatten(0, 1), n, may_rest)
        add_parts(parts, out, None if bias is None else bias.contiguous(), residual, activation)
        return out
    _run(
        plan, (a, a_by_rows), (b, b_by_rows), out, b.shape[1], may_rest, bias, residual,
        (scale_a, scale_b), activation,
    )  # fmt: skip
    return out


def _run(
    plan: Plan,
    a_operand: tuple[Tensor, bool],  # [m, k], whether it lies by rows
    b_operand: tuple[Tensor, bool],  # [k, n]
    out: Tensor,  # [m, n of the result]; or where parts are stored by themselves, these
    n: int,
    may_rest: bool,  # b is what was given, no copy: its first stages may be loaded early
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    activation: str = "none",
) -> None:
    (a, a_by_rows), (b, b_by_rows) = a_operand, b_operand
    (m, k), (scale_a, scale_b) = a.shape, scales
    a_rows = plan.a_rows(a_by_rows)
    launch = _launch(
        plan,
        a.device,
        tuple(None if x is None else x.dtype for x in (a, out, bias, residual)),
        (m, n, k),
        (a.stride(0 if a_by_rows else 1), a_by_rows),
        (b.stride(0 if b_by_rows else 1), b_by_rows),
        activation,
        None if residual is None else residual.stride(0),
        tuple(None if x is None else x.dim() for x in (scale_a, scale_b)),
        a_rows,
        out.stride(0),
        are_weights_at_rest() and may_rest and not plan.config.joined,
    )
    if plan.stream_tiles and not plan.apart:
        parts = torch.empty(plan.part_elements, dtype=torch.float32, device=a.device)
        published = flags(a.device)
    else:  # flags are few: see kernels/flags.py
        parts = _no_parts(a.device)
        published = parts.view(torch.int32)
    pointers = (
        out,
        out if bias is None else bias.contiguous(),
        out if residual is None else residual,
        parts if scale_a is None else scale_a.contiguous(),
        parts if scale_b is None else scale_b.contiguous(),
        parts,
        published,
    )
    try:
        launch((a, b, out), pointers)
    except BaseException:
        discard_flags(a.device)
        raise


def _choose(
    a: Tensor, b: Tensor, scaled: bool, gated: bool, bare: bool, batch_invariant: bool
) -> AnyPlan:
    """scaled, gated, bare: what follows the product, see Operands."""
    (m, k), n = a.shape, b.shape[1]
    kinds = [_operand(a, True), _operand(b, False)]
    copied = sum(x.numel() * x.element_size() for x, _, copies in kinds if copies)
    # Copies begin on lines.
    rows_of_a, rows_of_b = (
        LINE_BYTES if copies else row_alignment(max(x.stride()) * x.element_size())
        for x, _, copies in kinds
    )
    plain = not scaled and a.element_size() == 2 and a.stride(1) == 1 and b.stride(0) == 1
    unit = min(row_unit(a), row_unit(b.T)) if plain else 1
    operands = Operands(
        *(a.element_size(), plain and not gated, unit, copied, (rows_of_a, rows_of_b)),
        *(plain and gated, plain and bare),
    )
    return choose(m, n, k, operands, multiprocessors(a.device), batch_invariant)[0]


@cache
def _no_parts(device: torch.device) -> Tensor:
    """What stands for pointers that nobody uses."""
    return torch.empty(4, dtype=torch.float32, device=device)


@lru_cache(maxsize=4096)
def _launch(
    plan: Plan,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],  # of a, out, bias, residual
    sizes: tuple[int, int, int],
    a_layout: tuple[int, bool],  # stride between rows (or columns), whether it lies by rows
    b_layout: tuple[int, bool],
    activation: str,
    residual_stride: int | None,
    scale_dims: tuple[int | None, int | None],
    a_rows: int,  # of a box
    out_stride: int,
    at_rest: bool,  # b
) -> Launch:
    """All that does not depend on where the tensors lie."""
    config = plan.config
    m, n, k = sizes
    in_dtype, out_dtype, bias_dtype, _ = dtypes
    assert in_dtype is not None
    assert out_dtype is not None
    gated = reference.is_gated(activation)
    out_m = plan.group_ctas * plan.part_rows if plan.apart else m
    out_n = n // 2 if gated else n
    block_k = config.block_k(in_dtype.itemsize)
    b_columns = config.b_columns(gated, b_layout[1])
    out_box = (config.stored_rows, config.chunk(gated, out_dtype.itemsize))
    # Rows that the copy engine cannot address are stored by the warps, in the largest pieces that
    # rows consist of; its map is never used then.
    unit = gcd(out_stride * out_dtype.itemsize, _TMA_BYTES)
    addressable = unit == _TMA_BYTES
    out_shape, turned = (out_m, out_n), plan.transposed
    kernel_constants = constants(
        config,
        itemsize=in_dtype.itemsize,
        out_itemsize=out_dtype.itemsize,
        a_rows=a_rows,
        a_by_rows=a_layout[1],
        b_by_rows=b_layout[1],
        activation=activation,
        has_bias=bias_dtype is not None,
        has_residual=residual_stride is not None,
        has_scales=scale_dims[0] is not None,
        out_unit=0 if addressable else unit // out_dtype.itemsize,
        ahead=at_rest,
        streamed=plan.stream_tiles > 0 and not plan.apart,
        apart=plan.apart,
        transposed=turned,
    )
    return Launch(
        matmul_kernel,
        plan.num_ctas,
        device,
        dtypes,
        (
            _describe(in_dtype, (m, k), a_layout, (a_rows // config.across, block_k)),
            _describe(in_dtype, (k, n), b_layout, (block_k, b_columns), config.odd_box),
            _describe(
                out_dtype,
                out_shape[::-1] if turned else out_shape,
                (out_stride if addressable else LINE_BYTES, True),
                out_box[::-1] if turned else out_box,
            ),
        ),
        (
            *(out_m, n, out_stride, residual_stride or 0),
            *(int(bool(dim)) for dim in scale_dims),
            *plan.numbers,
        ),
        kernel_constants,
        dependent=True,
        cluster=config.cluster,
    )


def _describe(
    dtype: torch.dtype,
    shape: tuple[int, int],
    layout: tuple[int, bool],
    box: tuple[int, int],
    copied: tuple[int, int] | None = None,
) -> Box:
    """A matrix by rows, or the transpose of one by columns; copied: see `Box`."""
    stride, by_rows = layout
    if not by_rows:
        shape, box = shape[::-1], box[::-1]
    # A dimension of size 1 is never stepped over, so any legal stride will do.
    stride = stride if shape[0] > 1 else 16 * shape[1]
    shared = gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
    return Box(shape, (stride, 1), box, shared, copied)


def _operands(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, bool], tuple[Tensor, bool]]:
    """Both as the copy engine can address them, and whether they lie by rows.

    A copy is made where the base or a stride is no multiple of 16 bytes, and of an fp8 matrix whose
    contiguous dimension is not k.
    """
    (a, a_by_rows, copy_a), (b, b_by_rows, copy_b) = _operand(a, True), _operand(b, False)
    long = [x if by_rows else x.T for x, by_rows in ((a, a_by_rows), (b, b_by_rows))]
    copies = iter(padded(*(x for x, copied in zip(long, (copy_a, copy_b), strict=True) if copied)))
    if copy_a:
        a = next(copies) if a_by_rows else next(copies).T
    if copy_b:
        b = next(copies) if b_by_rows else next(copies).T
    return (a, a_by_rows), (b, b_by_rows)


def _operand(x: Tensor, k_last: bool) -> tuple[Tensor, bool, bool]:
    """x, whether it lies by rows, and whether it has to be copied. k_last: k is the last dimension."""
    by_rows = x.stride(1) == 1 or (x.shape[1] == 1 and x.stride(0) != 1)
    by_columns = x.stride(0) == 1 or x.shape[0] == 1
    if by_rows and by_columns:  # a single row or column: whichever has k in one piece
        by_rows = k_last
    if x.dtype == FP8 and by_rows != k_last:
        return (x.contiguous() if k_last else x.T.contiguous().T), k_last, True
    if not by_rows and not by_columns:
        return x, True, True
    long = x if by_rows else x.T
    per_unit = _TMA_BYTES // x.element_size()
    whole = long.stride(1) == 1 or long.shape[1] == 1
    fits = long.shape[0] == 1 or (long.stride(0) % per_unit == 0 and long.stride(0) > 0)
    return x, by_rows, not (whole and fits and x.data_ptr() % _TMA_BYTES == 0)


def efficiency(call: Any) -> float:
    """Share of the roofline that the plan for a call is predicted to reach on an H200."""
    if call.b_layout == "int4_words":
        return 0.5
    itemsize = call.dtype.itemsize
    rows = {
        "a": (call.m if call.a_layout == "column" else call.k, call.m * call.k),
        "b": (call.n if call.b_layout == "row" else call.k, call.n * call.k),
    }
    copied = sum(n * itemsize for stride, n in rows.values() if stride * itemsize % _TMA_BYTES)
    rows_of_a, rows_of_b = (
        row_alignment(stride * itemsize) if stride * itemsize % _TMA_BYTES == 0 else LINE_BYTES
        for stride, _ in rows.values()
    )
    plain = itemsize == 2 and (call.a_layout, call.b_layout) == ("row", "column")
    gated = reference.is_gated(call.activation)
    bare = call.activation == "none" and not call.has_residual and call.out_dtype == call.dtype
    operands = Operands(
        *(itemsize, plain and not gated, gcd(call.k, 8), copied, (rows_of_a, rows_of_b)),
        *(plain and gated, plain and bare),
    )
    _, seconds = choose(call.m, call.n, call.k, operands, H200.units, call.batch_invariant)
    margin = MARGIN if not copied else 1.0
    return (
        margin * least_time(linear_work(call.m, call.k, call.n, itemsize), H200).seconds / seconds
    )


def supports(call: Any) -> str | None:
    if call.device != "cuda":
        return f"it needs an NVIDIA GPU of compute capability 9.0, not a {call.device}"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"it is for compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16, FP8):
        return f"it takes bfloat16, float16 and float8_e4m3fn, not {call.dtype}"
    if call.b_layout == "int4_words" and call.dtype != torch.bfloat16:
        return f"with int4 weights it takes bfloat16, not {call.dtype}"
    if call.b_layout == "int4_words" and reference.is_gated(call.activation):
        return "with int4 weights it computes no gate"
    if call.out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it writes bfloat16, float16 and float32, not {call.out_dtype}"
    if reference.is_gated(call.activation) and call.b_layout == "row":
        return "with a gate it takes weights that are stored [n, k]"
    if call.k >= _MOST_K or (call.m // 64 + 1) * (call.n // 32 + 1) >= 2**30:
        return f"{call.m} x {call.n} x {call.k} is too large for its counters of steps and tiles"
    return None

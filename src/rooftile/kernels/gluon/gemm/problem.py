"""What every role of the matrix product needs to know."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.record import record

GROUPS = gl.constexpr(2)  # consumer warpgroups


@record
class Problem:
    """Sizes, pointers and compile-time switches."""

    out: gl.tensor  # pointer, [m, n of the result]; read only where out_unit is not 0
    bias: gl.tensor  # pointer, [n]
    residual: gl.tensor  # pointer, [m, n of the result]
    scale_a: gl.tensor  # pointer to float32, [m] or one
    scale_b: gl.tensor  # pointer to float32, [n] or one
    parts: gl.tensor  # pointer to float32, see fixup.py
    flags: gl.tensor  # pointer to int32, see fixup.py
    m: gl.tensor
    n: gl.tensor  # columns of b
    out_stride: gl.tensor
    residual_stride: gl.tensor
    scale_a_stride: gl.tensor  # 0 where one scale serves all rows
    scale_b_stride: gl.tensor
    block_m: gl.constexpr
    block_n: gl.constexpr
    block_k: gl.constexpr
    split_rows: gl.constexpr  # the warpgroups share a tile's rows, else its columns
    a_by_rows: gl.constexpr  # k is a's contiguous dimension
    b_by_rows: gl.constexpr  # n is b's contiguous dimension
    b_boxes: gl.constexpr
    gated: gl.constexpr
    activation: gl.constexpr  # of the gate, if there is one
    has_bias: gl.constexpr
    has_residual: gl.constexpr
    has_scales: gl.constexpr
    ahead: gl.constexpr  # b is weights at rest: kernels/weights_at_rest.py
    sharers: gl.constexpr  # CTAs, one below the other, that load a tile's columns together
    across: gl.constexpr  # CTAs, side by side, that load a tile's rows together
    split: gl.constexpr  # CTAs of a cluster that share a tile's steps: cluster_sum.py
    joined: gl.constexpr  # all warps of a cluster meet
    in_turn: gl.constexpr  # the warpgroups take a tile's steps in turn: turns.py
    transposed: gl.constexpr  # columns of a tile are rows of the result
    out_unit: gl.constexpr  # elements of a result that are stored at a time; 0: by the copy engine

"""A tile once more, by its consumer alone, where weights under an anchored maximum grew too large."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rooftile.kernels.gluon.attention.scores import adjusted, first_softmax, hide
from rooftile.kernels.gluon.tile.halves import (
    add_output,
    finish_output,
    multiply_used,
    output_layout,
    scale_output,
    zero_output,
)
from rooftile.kernels.gluon.tile.mask import key_range
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    left_operand_layout,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.rows import coordinates
from rooftile.kernels.triton_version import tma_load, tma_store_wait


@gluon.jit
def _load(desc, at, landed, box, phase: gl.constexpr):
    gl.thread_barrier()  # every warp has read what the box held
    mbarrier.expect(landed, desc.block_type.nbytes)
    tma_load(desc, at, landed, box)
    mbarrier.wait(landed, phase)


@gluon.jit
def box_for(tile, desc):
    """The beginning of a shared [64, dim] tile as a box of `desc`, which has no more rows."""
    rows: gl.constexpr = desc.block_shape[len(desc.block_shape) - 2]
    if rows == tile.shape[len(tile.shape) - 2]:
        return tile
    else:
        boxes: gl.constexpr = tile.shape[len(tile.shape) - 2] // rows
        shape: gl.constexpr = [boxes] + desc.block_shape  # noqa: RUF005
        return tile._reinterpret(desc.dtype, shape, desc.layout).index(0)


@gluon.jit
def attend_again(
    problem,
    k_desc,  # in boxes of as many rows as there is room for: 64 or 32
    v_desc,
    landed,  # a barrier
    q,  # shared tile [64, k_dim]
    box,  # shared memory for keys and for values in turn, where the output goes later
    place,  # the batch, or of a ragged one the sequence's first key
    head,
    row0,
    q_len,
    kv_len,
    slope,
    dtype: gl.constexpr,
    v_dim: gl.constexpr,
    part: gl.constexpr = False,  # only blocks first_block .. first_block + num_blocks - 1 of the tile's
    first_block=0,
    num_blocks=0,
    at_sink=True,
):
    """Output [64, v_dim] and softmax of 64 query rows under a running maximum, one box of keys
    after the other. Nothing overlaps: it is for scores that rise by more than 2^64 (44 in natural
    units) above those of the tile's first keys."""
    block: gl.constexpr = k_desc.block_shape[len(k_desc.block_shape) - 2]
    S: gl.constexpr = accumulator_layout(block)
    O: gl.constexpr = output_layout(v_dim, problem.v_used)  # noqa: E741
    columns = gl.arange(0, block, columns_of(S))
    rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
    tile = box.reshape([block, v_dim])
    offset = kv_len - q_len
    kv_head = head // problem.group_size
    first, blocks = key_range(
        row0,
        GROUP_ROWS,
        q_len,
        kv_len,
        problem.left,
        problem.right,
        block,
        problem.has_left,
        problem.has_right,
    )
    if part:
        per_block: gl.constexpr = problem.block // block
        end = gl.minimum(first + blocks, (first_block + num_blocks) * per_block)
        first = gl.maximum(first, first_block * per_block)
        blocks = end - first
    softmax = first_softmax(problem, head, kv_len, rows_of(S), at_sink)
    o = zero_output(v_dim, problem.v_used)
    tma_store_wait(0)  # the output of the tile before has left the box
    for n in range(first, first + blocks):
        at = coordinates(problem.ragged, place, kv_head, place, kv_len, n * block)
        _load(k_desc, at, landed, box, 0)
        s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
        s = multiply_used(q, tile, s, problem.k_used)
        s = wait(0, deps=[s])
        s, factor = adjusted(problem, s, slope, rows + offset, n * block + columns)
        s = hide(problem, s, rows, n * block, columns, offset, kv_len, problem.hides_in_one)
        p, alpha, softmax = softmax.step(s, factor, False, 0)
        o = scale_output(o, alpha, v_dim, problem.v_used, False)
        weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
        _load(v_desc, at, landed, box, 1)
        o = add_output(o, weights, tile, problem.v_used)
        o = finish_output(o, weights, v_dim, problem.v_used)
    return o, softmax.maximum, softmax.total

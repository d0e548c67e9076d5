"""A tile once more, by its consumer alone, where weights under an anchored maximum grew too large.

As gluon/attention/again.py, for each rotation of the queries and the keys that meet it.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rooftile.kernels.gluon.attention.scores import adjusted, hide
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    left_operand_layout,
    multiply,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.rows import coordinates
from rooftile.kernels.gluon.tile.softmax import start_softmax
from rooftile.kernels.triton_version import tma_load, tma_store_wait


@gluon.jit
def _load(desc, at, landed, box, phase):
    gl.thread_barrier()  # every warp has read what the box held
    mbarrier.expect(landed, desc.block_type.nbytes)
    tma_load(desc, at, landed, box)
    mbarrier.wait(landed, phase)
    return phase ^ 1


@gluon.jit
def attend_again(
    problem,
    intra_desc,
    succ_desc,
    inter_desc,
    k_desc,  # boxes of 64 rows
    v_desc,
    landed,  # a barrier, whose next phase is 0 before and after
    q,  # shared tile [64, k_dim], which is written, and as a box
    q_box,
    box,  # shared memory for keys and for values in turn, where the output goes later
    head,
    row0,
    q_start,
    q_len,
    kv_len,
    dtype: gl.constexpr,
    v_dim: gl.constexpr,
):
    """Output [64, v_dim] and softmax of 64 query rows under a running maximum, one block of 64 keys
    after the other. Nothing overlaps: it is for scores that rise by more than 2^64 (44 in natural
    units) above those of the tile's last keys."""
    S: gl.constexpr = accumulator_layout(GROUP_ROWS)
    O: gl.constexpr = accumulator_layout(v_dim)  # noqa: E741
    columns = gl.arange(0, GROUP_ROWS, columns_of(S))
    rows = row0 + gl.arange(0, GROUP_ROWS, rows_of(S))
    tile = box.reshape([GROUP_ROWS, v_dim])
    offset = kv_len - q_len
    kv_head = head // problem.group_size
    kv_start = q_start // problem.q_len * problem.kv_len
    chunk_len = problem.chunk * problem.block
    own = gl.maximum(kv_len - 1, 0) // chunk_len * chunk_len
    before = gl.maximum(own - chunk_len, 0)
    seen = gl.minimum(row0 + GROUP_ROWS, q_len) + offset
    at_q = coordinates(True, 0, head, q_start, q_len, row0)
    softmax = start_softmax(GROUP_ROWS, rows_of(S))
    o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
    phase = gl.to_tensor(0)
    loads = gl.to_tensor(0)
    tma_store_wait(0)  # the output of the tile before has left the box
    for rotation in range(3):
        begin = own
        end = seen
        if rotation == 1:
            begin = before
            end = own
        elif rotation == 2:
            begin = own * 0
            end = before
        blocks = gl.cdiv(gl.maximum(end - begin, 0), GROUP_ROWS)
        if blocks > 0:
            loads += 1
            if rotation == 0:
                phase = _load(intra_desc, at_q, landed, q_box, phase)
            elif rotation == 1:
                phase = _load(succ_desc, at_q, landed, q_box, phase)
            else:
                phase = _load(inter_desc, at_q, landed, q_box, phase)
        for i in range(blocks):
            key = begin + i * GROUP_ROWS
            at = coordinates(True, 0, kv_head, kv_start, kv_len, key)
            phase = _load(k_desc, at, landed, box, phase)
            s = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, S)
            s = multiply(q, tile.permute((1, 0)), s, use_acc=False)
            s = wait(0, deps=[s])
            s, factor = adjusted(problem, s, None, rows + offset, key + columns)
            s = hide(problem, s, rows, key, columns, offset, kv_len)
            p, alpha, softmax = softmax.step(s, factor, False, 0)
            o = o * gl.expand_dims(gl.convert_layout(alpha, rows_of(O)), 1)
            weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
            phase = _load(v_desc, at, landed, box, phase)
            o = multiply(weights, tile, o)
            o, weights = wait(0, deps=[o, weights])
    if loads % 2 == 1:  # an odd number of loads: one more, for nothing but the barrier's phase
        _load(k_desc, coordinates(True, 0, kv_head, kv_start, 0, 0), landed, box, phase)
    return o, softmax.maximum, softmax.total

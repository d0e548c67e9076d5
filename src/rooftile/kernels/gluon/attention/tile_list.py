"""The tiles of a ragged batch, listed on the device so that nothing waits for the host.

For many sequences; few are sorted by each CTA for itself (sequences.py).
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Fields of one entry of the list; kv_len -1 marks padding after the last sequence.
NUM_FIELDS = 8
# Before the entries stands one that holds their number and the counter of dynamic tiles, 0 at launch.
ENTRY = gl.constexpr(NUM_FIELDS)  # first, tiles, q_start, q_len, kv_start, kv_len, sequence, unused


@gluon.jit(do_not_specialize=["entries", "cu_seqlens_q", "cu_seqlens_k", "batch", "tokens"])
def list_tiles_kernel(
    entries,  # pointer, [1 + capacity, ENTRY] int32, see ENTRY
    cu_seqlens_q,  # pointer, [batch + 1] int32
    cu_seqlens_k,  # pointer, [batch + 1] int32
    batch,
    tokens,  # rows of q; those after the last sequence form a sequence without keys
    tile_rows: gl.constexpr,
):
    """Lists the query tiles of a ragged batch, sequences with more keys first.

    Each of a sequence's entries stands for one of its tiles in every head; all say the same: the
    sequence's first entry, how many it has, and where its tokens are.

    One CTA a sequence, and one for the padding: each counts the tiles of the sequences before its
    own, so none waits for another.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, L)
    me = gl.program_id(0)
    q_start = gl.load(cu_seqlens_q + me)
    kv_start = gl.load(cu_seqlens_k + me)
    if me == batch:
        q_len = tokens - q_start
        kv_len = -1
    else:
        q_len = gl.load(cu_seqlens_q + me + 1) - q_start
        kv_len = gl.load(cu_seqlens_k + me + 1) - kv_start
    before = gl.full([128], 0, gl.int32, L)
    for i in range(0, batch, 128):
        other = i + lane
        valid = other < batch
        other_q = gl.load(cu_seqlens_q + other + 1, mask=valid, other=0) - gl.load(
            cu_seqlens_q + other, mask=valid, other=0
        )
        other_kv = gl.load(cu_seqlens_k + other + 1, mask=valid, other=0) - gl.load(
            cu_seqlens_k + other, mask=valid, other=0
        )
        first = (other_kv > kv_len) | ((other_kv == kv_len) & (other < me))
        tiles = (other_q + (tile_rows - 1)) // tile_rows
        before += gl.where(valid & first, tiles, 0)
    start = gl.sum(before, 0)
    tiles = gl.cdiv(q_len, tile_rows)
    if me == batch:
        gl.store(entries, start + tiles)
        gl.store(entries + 1, 0)
        gl.store(entries + 2, 0)
    for i in range(0, tiles, 128):
        m = i + lane
        entry = entries + (1 + start + m) * ENTRY
        mine = m < tiles
        zero = m * 0
        gl.store(entry, zero + start, mask=mine)
        gl.store(entry + 1, zero + tiles, mask=mine)
        gl.store(entry + 2, zero + q_start, mask=mine)
        gl.store(entry + 3, zero + q_len, mask=mine)
        gl.store(entry + 4, zero + kv_start, mask=mine)
        gl.store(entry + 5, zero + kv_len, mask=mine)
        gl.store(entry + 6, zero + me, mask=mine)

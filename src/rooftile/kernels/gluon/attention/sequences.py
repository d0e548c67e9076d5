"""Which sequence of a ragged batch a tile belongs to.

Sequences with more keys come first. Each CTA sorts up to 63 or 127 for itself; the tiles of more are listed
by a kernel before (tile_list.py).
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.attention.tile_list import ENTRY
from rooftile.kernels.gluon.tile.record import record

NO_TILES = gl.constexpr(2**15 - 1)
_AT_A_TIME = gl.constexpr(16)  # sequences that a CTA compares its own with


@gluon.jit
def _lengths(cu_seqlens, i, batch, end):
    """Lengths of sequences i [count]; that of sequence `batch` reaches up to `end`."""
    start = gl.load(cu_seqlens + gl.minimum(i, batch))
    following = gl.load(cu_seqlens + gl.minimum(i + 1, batch))
    return gl.where(i < batch, following, end) - start


@gluon.jit
def start_sequences(
    starts,  # shared [most] int16
    cu_seqlens_q,  # pointer, [batch + 1] int32
    cu_seqlens_k,  # pointer, [batch + 1] int32
    batch,  # less than most
    tokens,  # rows of q; those after the last sequence form a sequence without keys
    tile_rows: gl.constexpr,
    most: gl.constexpr,
):
    """Writes which tile of a head is the first of each sequence, those with more keys first (to within
    `most`), and returns the number of tiles, less than NO_TILES, which stands for a sequence without any.
    For four warps."""
    L: gl.constexpr = gl.BlockedLayout([1, _AT_A_TIME], [32, 1], [4, 1], [1, 0])
    i = gl.arange(0, most, gl.SliceLayout(1, L))
    keys = gl.where(i < batch, _lengths(cu_seqlens_k, i, batch, 0), -1)
    tiles = (_lengths(cu_seqlens_q, i, batch, tokens) + (tile_rows - 1)) // tile_rows
    tiles = gl.where(i <= batch, tiles, 0)
    # The higher, the earlier; of about as many keys, the first. No two are equal.
    place = (keys // most) * most + (most - 1 - i)
    # All threads see all of them through shared memory.
    shape: gl.constexpr = [most // _AT_A_TIME, _AT_A_TIME]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    places = gl.allocate_shared_memory(gl.int32, shape, plain)
    counts = gl.allocate_shared_memory(gl.int16, shape, plain)
    places._reinterpret(gl.int32, [most], plain).store(place)
    counts._reinterpret(gl.int16, [most], plain).store(tiles.to(gl.int16))
    mine = gl.expand_dims(place, 1)
    start = gl.full([most], 0, gl.int32, gl.SliceLayout(1, L))
    for n in range(batch // _AT_A_TIME + 1):
        other = gl.expand_dims(places.index(n).load(gl.SliceLayout(0, L)), 0)
        others = counts.index(n).load(gl.SliceLayout(0, L)).to(gl.int32)
        start += gl.sum(gl.where(other > mine, gl.expand_dims(others, 0), 0), 1)
    starts.store(gl.where(tiles > 0, start, NO_TILES).to(gl.int16))
    total = gl.sum(tiles, 0)
    # It lies where Triton writes what roles are told; all warps read it before one of them does.
    gl.thread_barrier()
    return total


@gluon.jit
def find_sequence(starts, tile, most: gl.constexpr):
    """The sequence that a tile of a head belongs to, and the first of its tiles. For one warp."""
    L: gl.constexpr = gl.BlockedLayout([most // 32], [32], [1], [0])
    start = starts.load(L).to(gl.int32)
    # Of the sequences that begin at the tile or before, the last.
    found = gl.where(start <= tile, start * most + gl.arange(0, most, L), 0)
    last = gl.max(found, 0)
    return last % most, last // most


@record
class Sequences:
    """The sequences of a ragged batch, and the padding after them, which has no keys."""

    entries: gl.tensor  # pointer, [num_entries, ENTRY] int32, where they are listed
    starts: gl.shared_memory_descriptor  # where they are sorted, see start_sequences
    cu_seqlens_q: gl.tensor  # pointers, [batch + 1] int32, where they are sorted
    cu_seqlens_k: gl.tensor
    batch: gl.tensor
    tokens: gl.tensor  # rows of q
    most_sorted: gl.constexpr  # sequences that a CTA sorts for itself, 0: they are listed

    @gluon.jit
    def of_tile(self, tile):
        """Number, first tile, q_start, q_len, kv_start, kv_len of the sequence of a head's tile."""
        if self.most_sorted:
            i, first = find_sequence(self.starts, tile, self.most_sorted)
            after = gl.minimum(i + 1, self.batch)
            q_start = gl.load(self.cu_seqlens_q + i)
            q_end = gl.load(self.cu_seqlens_q + after)
            kv_start = gl.load(self.cu_seqlens_k + i)
            kv_len = gl.load(self.cu_seqlens_k + after) - kv_start
            if i == self.batch:  # the padding
                q_end = self.tokens
                kv_len = -1
            return i, first, q_start, q_end - q_start, kv_start, kv_len
        else:
            entry = self.entries + tile * ENTRY
            first, q_start, q_len = (
                gl.load(entry),
                gl.load(entry + 2),
                gl.load(entry + 3),
            )
            kv_start, kv_len = gl.load(entry + 4), gl.load(entry + 5)
            return gl.load(entry + 6), first, q_start, q_len, kv_start, kv_len

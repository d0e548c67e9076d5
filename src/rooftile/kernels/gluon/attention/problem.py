"""What every role of the attention kernel needs to know, and what a tile of it is."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.attention.sequences import Sequences
from rooftile.kernels.gluon.tile.mask import key_range
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill

# Fields of the message that describes a tile to the consumers; blocks 0: there are no more.
BLOCKS = gl.constexpr(0)
BATCH = gl.constexpr(1)  # where ragged: the sequence if there are mods, else its first key
HEAD = gl.constexpr(2)
ROW0 = gl.constexpr(3)
Q_START = gl.constexpr(4)
Q_LEN = gl.constexpr(5)
KV_LEN = gl.constexpr(6)
FIRST = gl.constexpr(7)
PLACE = gl.constexpr(8)  # of the item, where tiles are in parts: see shares.py
FIELDS = gl.constexpr(8)
FIELDS_OF_PARTS = gl.constexpr(9)


@record
class Inlined:
    """Functions of the caller, and the pointers that they take after the indices."""

    score: gl.constexpr  # None: there is none
    mask: gl.constexpr
    score_captured: gl.tuple
    mask_captured: gl.tuple
    any: gl.constexpr


@record
class Problem:
    """What every role of the kernel needs to know."""

    lse: gl.tensor  # pointer, [tokens, heads] or [batch, q_len, heads] float32
    sink: gl.tensor  # pointer, [heads] float32
    slopes: gl.tensor  # pointer, [heads] float32, of ALiBi
    sequences: Sequences  # (ragged)
    mods: Inlined
    num_tiles: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor  # query heads per key-value head
    q_len: gl.tensor
    kv_len: gl.tensor
    q_tiles: gl.tensor  # tiles per sequence and head (dense)
    num_rows_of_heads: gl.tensor  # batch * heads (dense)
    section: gl.tensor  # heads whose K and V are meant to share the L2 cache
    left: gl.tensor
    right: gl.tensor
    factor: gl.tensor  # raw scores to log2 units
    softcap: gl.tensor
    ragged: gl.constexpr
    longest_first: gl.constexpr
    has_left: gl.constexpr
    has_right: gl.constexpr
    has_softcap: gl.constexpr
    has_sink: gl.constexpr
    has_alibi: gl.constexpr
    groups: gl.constexpr
    block: gl.constexpr  # keys per tile
    turns: gl.constexpr  # warpgroups that take turns at the matrix unit, 1: none
    overlapped: gl.constexpr  # the softmax of a block runs under the product of the one before
    lazy: gl.constexpr
    k_used: gl.constexpr  # columns of Q and K before the zeros that fill a tile up
    v_used: gl.constexpr
    anchored: gl.constexpr  # the maximum is that of the first blocks of a tile
    sums_in_parts: gl.constexpr  # see softmax.in_parts
    software_share: gl.constexpr
    own_output: gl.constexpr  # the output tile has shared memory of its own
    reads_ahead: gl.constexpr  # the next tile's message is read under the last product
    loads_early: gl.constexpr  # a CTA's first tile has been loaded by first_tile.py
    hides_in_one: gl.constexpr  # masks are pieces of assembly, see tile/mask.py

    @gluon.jit
    def tile(self, t):
        """Sequence (where somebody asks), head, first row, q_start, q_len, kv_start, kv_len of tile t."""
        if self.ragged:
            sequence, first, q_start, q_len, kv_start, kv_len = self.sequences.of_tile(
                t // self.num_heads
            )
            first *= self.num_heads
            if self.longest_first:
                head = (t - first) % self.num_heads
                back = (t - first) // self.num_heads
            else:
                tiles = gl.cdiv(q_len, GROUP_ROWS * self.groups)
                head = (t - first) // tiles
                back = (t - first) % tiles
            row0 = (gl.cdiv(q_len, GROUP_ROWS * self.groups) - 1 - back) * (
                GROUP_ROWS * self.groups
            )
            return sequence, head, row0, q_start, q_len, kv_start, kv_len
        else:
            per_section = self.section * self.q_tiles
            first_head = (t // per_section) * self.section
            width = gl.minimum(self.section, self.num_rows_of_heads - first_head)
            m = (t % per_section) // width
            if self.longest_first:
                m = self.q_tiles - 1 - m
            head = first_head + (t % per_section) % width
            batch = head // self.num_heads
            row0 = m * (GROUP_ROWS * self.groups)
            return batch, head % self.num_heads, row0, 0, self.q_len, 0, self.kv_len

    @gluon.jit
    def q_fill(self, turn, group):
        """The fill of the Q ring for a warpgroup; each has one stage of its own, or two."""
        return Fill(turn.stage * self.groups + group, turn.phase)

    @gluon.jit
    def next_q(self, turn):
        if self.own_output:
            return Fill(turn.stage ^ 1, turn.phase ^ turn.stage)
        else:
            return Fill(turn.stage, turn.phase ^ 1)

    @gluon.jit
    def keys(self, row0, q_len, kv_len):
        """First block of keys of a tile, and how many."""
        return self.keys_of(row0, GROUP_ROWS * self.groups, q_len, kv_len)

    @gluon.jit
    def keys_of(self, row0, num_rows, q_len, kv_len):
        """First block of keys that rows row0 .. row0 + num_rows - 1 see, and how many."""
        return key_range(
            row0,
            num_rows,
            q_len,
            kv_len,
            self.left,
            self.right,
            self.block,
            self.has_left,
            self.has_right,
        )

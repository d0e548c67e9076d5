"""What every role of the kernel needs to know, and what a tile of it is."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill

# Fields of the message that describes a tile to the consumers; blocks 0: there are no more.
BLOCKS = gl.constexpr(0)
HEAD = gl.constexpr(1)
ROW0 = gl.constexpr(2)  # of the piece: the queries of a sequence that stand in one chunk
Q_START = gl.constexpr(3)  # the piece's first query, of those of the whole batch
Q_LEN = gl.constexpr(4)  # its queries
KV_LEN = gl.constexpr(5)  # its keys, the last of which its last query stands at
FIELDS = gl.constexpr(6)
_PREFETCHED = gl.constexpr(3)  # blocks of a rotation that are sent before the next rotation


@record
class ChunkProblem:
    """As the attention kernel's problem, causal; sequences are cut into pieces at chunk borders."""

    lse: gl.tensor  # pointer, [batch, q_len, heads] float32
    num_tiles: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor  # query heads per key-value head
    q_len: gl.tensor
    kv_len: gl.tensor
    q_tiles: gl.tensor  # of a sequence and head
    num_rows_of_heads: gl.tensor  # batch * heads
    section: gl.tensor  # heads whose K and V are meant to share the L2 cache
    left: gl.tensor  # of no use
    right: gl.tensor  # 0
    chunk: gl.tensor  # blocks of keys of a chunk
    first_rows: gl.tensor  # queries of the first piece
    first_tiles: gl.tensor  # and its tiles
    chunk_tiles: gl.tensor  # tiles of a piece of a whole chunk
    factor: gl.tensor  # raw scores to log2 units
    softcap: gl.tensor
    has_left: gl.constexpr
    has_right: gl.constexpr
    has_softcap: gl.constexpr
    groups: gl.constexpr
    block: gl.constexpr  # keys per tile
    turns: gl.constexpr  # warpgroups that take turns at the matrix unit, 1: none
    lazy: gl.constexpr
    anchored: gl.constexpr  # the maximum is that of the first blocks of a tile
    software_share: gl.constexpr
    own_output: gl.constexpr  # the output tile has shared memory of its own

    @gluon.jit
    def tile(self, t):
        """Head, first row in its piece, q_start, q_len, kv_start, kv_len of tile t, longest first."""
        per_section = self.section * self.q_tiles
        first_head = (t // per_section) * self.section
        width = gl.minimum(self.section, self.num_rows_of_heads - first_head)
        m = self.q_tiles - 1 - (t % per_section) // width
        head = first_head + (t % per_section) % width
        batch = head // self.num_heads
        later = gl.maximum(m - self.first_tiles, 0)
        after = m >= self.first_tiles  # the first piece
        chunk_len = self.chunk * self.block
        begins = gl.where(after, self.first_rows + later // self.chunk_tiles * chunk_len, 0)
        ends = gl.where(after, gl.minimum(begins + chunk_len, self.q_len), self.first_rows)
        row0 = gl.where(after, later % self.chunk_tiles, m) * (GROUP_ROWS * self.groups)
        q_start = batch * self.q_len + begins
        kv_len = ends + self.kv_len - self.q_len
        kv_start = batch * self.kv_len
        return head % self.num_heads, row0, q_start, ends - begins, kv_start, kv_len

    @gluon.jit
    def blocks(self, row0, q_len, kv_len):
        """Blocks of keys that a tile's rows see, at least 1."""
        last = gl.minimum(row0 + GROUP_ROWS * self.groups, q_len)
        return gl.maximum(gl.cdiv(kv_len - q_len + last, self.block), 1)

    @gluon.jit
    def first_rotation(self, last, kv_len):
        """Which rotation of its queries a tile meets its last block of keys with, and the block from which
        on: earlier ones are met with the next."""
        own = gl.maximum(kv_len - 1, 0) // (self.chunk * self.block) * self.chunk
        rotation = gl.where(last < own, 1, 0) + gl.where(last < own - self.chunk, 1, 0)
        return rotation, gl.where(rotation == 2, 0, own - rotation * self.chunk)

    @gluon.jit
    def runs(self, rotation, kv_len):
        """How many rotations a tile that begins with one meets."""
        own = gl.maximum(kv_len - 1, 0) // (self.chunk * self.block)
        return gl.minimum(own, 2) - rotation + 1

    @gluon.jit
    def next_rotation(self, rotation, border):
        following = rotation + 1
        return following, gl.where(following == 2, 0, border - self.chunk)

    @gluon.jit
    def due(self, first, border):
        """At which block of a rotation that begins with `first`, and whose last is `border`, its keys being
        on their way, the next rotation is sent; -1 where none follows."""
        # With two stages a few blocks in, when the consumers have given the other one back; the only one is
        # given back for the first keys that meet the next rotation.
        at = gl.maximum(border, first - _PREFETCHED) if self.own_output else border - 1
        return gl.where(border > 0, at, -1)

    @gluon.jit
    def q_fill(self, turn, group: gl.constexpr):
        """The fill of the Q ring for a warpgroup; each has one stage of its own, or two."""
        return Fill(turn.stage * self.groups + group, turn.phase)

    @gluon.jit
    def next_q(self, turn):
        if self.own_output:
            return Fill(turn.stage ^ 1, turn.phase ^ turn.stage)
        else:
            return Fill(turn.stage, turn.phase ^ 1)

"""What every role of the paged kernel knows, and where the plan says what it has to do."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.attention.problem import Inlined
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill

# Words of an item of the plan (planning/split_kv.py: Item).
ITEM_WORDS = gl.constexpr(12)
REQUEST = gl.constexpr(0)
KV_HEAD = gl.constexpr(1)
ROW_BEGIN = gl.constexpr(2)
ROW_END = gl.constexpr(3)
KV_BEGIN = gl.constexpr(5)
KV_END = gl.constexpr(6)
PARTIAL_ROW = gl.constexpr(7)
MERGE = gl.constexpr(8)
Q_BEGIN = gl.constexpr(9)
Q_LEN = gl.constexpr(10)
KV_LEN = gl.constexpr(11)

READ_AGAIN = gl.constexpr(-2)  # instead of a merge: the item's keys will be read again, at any time

# Words of a merge of the plan.
MERGE_WORDS = gl.constexpr(8)
FIRST_PART = gl.constexpr(4)  # row of the partial buffers
PARTS = gl.constexpr(5)

# Fields of the message that describes an item to the consumers.
MORE = gl.constexpr(0)  # 0: there are no more items
TILES = gl.constexpr(1)
LAST = gl.constexpr(2)  # the item's last KV tile, where it begins
HEAD = gl.constexpr(3)  # kv head
FIRST_ROW = gl.constexpr(4)
END_ROW = gl.constexpr(5)
SLOT = gl.constexpr(6)  # row of the partial buffers, -1: the output
TOKEN = gl.constexpr(7)  # the request's first query token
QUERIES = gl.constexpr(8)
KEYS = gl.constexpr(9)
JOINED_BY = gl.constexpr(10)  # index of the merge
OF_REQUEST = gl.constexpr(11)  # index of the request
FIELDS = gl.constexpr(12)


# Words of the plan's header.
COMMON = gl.constexpr(5)  # items that are drawn one at a time
DRAWN = gl.constexpr(6)  # shares or items, beyond the first of each CTA
FINISHED = gl.constexpr(7)  # CTAs that draw no more

WARP = gl.constexpr(32)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def pick(x, lane):
    """One number of 32, of a warp with one each."""
    return gl.sum(gl.where(gl.arange(0, WARP, LANES) == lane, x, 0), 0)


@record
class Work:
    """What every role of the kernel needs to know."""

    q: gl.tensor  # pointer, [tokens, heads, k_dim]
    out: gl.tensor  # pointer, [tokens, heads, v_dim], contiguous
    lse: gl.tensor  # pointer, [tokens, heads] float32
    partial_out: gl.tensor  # pointer, [partial_rows, v_dim] float32
    partial_lse: gl.tensor  # pointer, [partial_rows] float32
    sink: gl.tensor  # pointer, [heads] float32
    k_scale: gl.tensor  # pointers, [kv heads] float32 (8-bit pages)
    v_scale: gl.tensor
    k_pages: gl.tensor  # pointers, see `describe_pages`
    v_pages: gl.tensor
    plan: gl.tensor  # pointer to int32, planning/split_kv.py
    page_table: gl.tensor  # pointer to int32, [batch, max_pages]
    end_of_queries: gl.tensor  # pointer to int32: cu_seqlens_q[batch]
    shares: gl.tensor  # of the plan
    tokens: gl.tensor  # those from cu_seqlens_q[batch] on are padding
    ctas_at: gl.tensor  # where sections of the plan begin
    merges_at: gl.tensor
    items_at: gl.tensor
    table_stride: gl.tensor
    k_pitch: gl.tensor  # rows of one head from a page to the next
    v_pitch: gl.tensor
    k_stride: gl.tensor  # of rows, and of heads
    v_stride: gl.tensor
    k_head_stride: gl.tensor
    v_head_stride: gl.tensor
    q_stride: gl.tensor  # of tokens
    q_head_stride: gl.tensor
    group_size: gl.tensor  # query heads of a kv head
    num_heads: gl.tensor
    k_width_of_8: gl.tensor  # k_dim / 8, v_dim / 8 of the tensors; tiles may be wider
    v_width_of_8: gl.tensor
    left: gl.tensor
    right: gl.tensor
    factor: gl.tensor  # raw scores to log2 units
    softcap: gl.tensor
    chunk: gl.tensor  # KV tiles of a chunk, where queries are rotated for each distance in chunks
    with_lse: gl.tensor  # 0: nobody reads it
    said: gl.shared_memory_descriptor  # [groups, 4] int8, see tile/said.py
    row_stride: gl.constexpr  # of the partial buffers, from part to part
    page_size: gl.constexpr
    packed: (
        gl.constexpr
    )  # group size where tiles of Q and the output are boxes; 0: rows are gathered
    group: gl.constexpr  # group size where it is a power of two, else 0
    q_stages: gl.constexpr  # of a warpgroup
    own_output: gl.constexpr  # the output goes through shared memory of its own
    q_with_values: gl.constexpr  # queries are loaded by who loads values, and given back early
    quantised: gl.constexpr  # pages of 8-bit numbers
    has_left: gl.constexpr
    has_right: gl.constexpr
    has_softcap: gl.constexpr
    has_sink: gl.constexpr
    rotations: gl.constexpr  # of every query, `tokens` apart in q: 3 with dual chunks, else 1
    groups: gl.constexpr
    block: gl.constexpr  # keys per tile
    turns: gl.constexpr  # warpgroups that take turns at the matrix unit, 1: none
    lazy: gl.constexpr
    anchored: gl.constexpr  # the row maximum is that of an item's last keys
    software_share: gl.constexpr
    overlapped: gl.constexpr  # the softmax of a tile runs under the product of the one before
    sums_in_parts: gl.constexpr  # see softmax.in_parts
    reads_ahead: gl.constexpr  # an item's message is read before the one before ends
    k_used: gl.constexpr  # columns of products
    v_used: gl.constexpr
    mods: Inlined  # functions of the caller: none
    drawn: gl.constexpr  # shares go to whichever CTA is free
    loaders: gl.constexpr  # warps that load: 2 have keys and values to themselves
    passing: gl.constexpr  # requests' keys leave the L2 cache before those of groups

    @gluon.jit
    def heads_of_group(self):
        """Query heads of a kv head, as a compile-time constant where divisions gain by it."""
        return self.group if self.group > 0 else self.group_size

    @gluon.jit
    def q_fill(self, turn, group):
        """The fill of the Q ring for a warpgroup: each has a stage of its own, or two."""
        return Fill(turn.stage * self.groups + group, turn.phase)

    @gluon.jit
    def next_q(self, turn):
        if self.q_stages == 2:
            return Fill(turn.stage ^ 1, turn.phase ^ turn.stage)
        else:
            return Fill(turn.stage, turn.phase ^ 1)

    @gluon.jit
    def first_rotation(self, last, kv_len):
        """Which rotation of its queries an item meets its last KV tile with, and the tile from which
        on: earlier ones are met with the next. A request's queries lie in the chunk of its last key.
        """
        own = gl.maximum(kv_len - 1, 0) // (self.chunk * self.block) * self.chunk
        rotation = gl.where(last < own, 1, 0) + gl.where(last < own - self.chunk, 1, 0)
        return rotation, gl.where(rotation == 2, 0, own - rotation * self.chunk)

    @gluon.jit
    def runs(self, rotation, first_tile, kv_len):
        """How many rotations an item that begins with one meets down to its first KV tile."""
        last, _border = self.first_rotation(first_tile, kv_len)
        return gl.maximum(last - rotation, 0) + 1

    @gluon.jit
    def next_rotation(self, rotation, border):
        following = rotation + 1
        return following, gl.where(following == 2, 0, border - self.chunk)

    @gluon.jit
    def first_item(self):
        """Where a CTA begins: its share's number, a pointer to the first item, how many follow it in
        the share, its words [32]; from which on items are drawn one at a time (0: CTAs have shares), and
        the number of shares.

        Of items that are drawn CTAs take the first half in turn, without waiting for a counter; the
        others are as many as uneven ones need to come out even.
        """
        share = gl.program_id(0)
        lane = gl.arange(0, WARP, LANES)
        run = gl.load(self.plan + self.ctas_at + 2 * share + lane, mask=lane < 2, other=0)
        common = 0
        words = run
        if self.drawn:
            common = gl.load(self.plan + COMMON)
            # What it is if all are drawn, without waiting to know whether they are.
            words = self.words(self.plan + self.items_at + share * ITEM_WORDS, True)
        first = pick(run, 0)
        count = pick(run, 1)
        if common > 0:
            first = share
            count = gl.where(share < common, 1, 0)
        end = gl.where(common > 0, common, self.shares)
        drawn_from = 0
        if self.drawn:
            ctas = gl.num_programs(0)
            drawn_from = gl.where(common > 0, gl.maximum(common // (2 * ctas), 1) * ctas, 0)
        item = self.plan + self.items_at + first * ITEM_WORDS
        if count == 0:
            share, item, count = self.next_share(share, drawn_from, end)
        if (common == 0) | (share != gl.program_id(0)):
            words = self.words(item, share < end)
        return share, item, count - 1, words, drawn_from, end

    @gluon.jit
    def next_item(self, share, item, following, drawn_from, end):
        """The same of the item after this one; past the end of all there is none."""
        item += ITEM_WORDS
        following -= 1
        if following < 0:
            share, item, count = self.next_share(share, drawn_from, end)
            following = count - 1
        return share, item, following, self.words(item, share < end)

    @gluon.jit
    def next_share(self, share, drawn_from, end):
        """A share that has items and that nobody else has: its number, its first item, how many."""
        first = 0
        count = 0
        if self.drawn:
            lane = gl.arange(0, WARP, LANES)
            share += gl.num_programs(0)
            if share >= drawn_from:
                base = gl.maximum(drawn_from, gl.num_programs(0))
                share = base + gl.atomic_add(self.plan + DRAWN, 1, sem="relaxed")
            first = share
            count = 1
            if drawn_from == 0:
                count = 0
                while (count == 0) & (share < end):
                    run = gl.load(
                        self.plan + self.ctas_at + 2 * share + lane, mask=lane < 2, other=0
                    )
                    first = pick(run, 0)
                    count = pick(run, 1)
                    if count == 0:
                        drawn = gl.atomic_add(self.plan + DRAWN, 1, sem="relaxed")
                        share = gl.num_programs(0) + drawn
        else:
            share = end
        return share, self.plan + self.items_at + first * ITEM_WORDS, count

    @gluon.jit
    def words(self, item, there):
        lane = gl.arange(0, WARP, LANES)
        return gl.load(item + lane, mask=(lane < ITEM_WORDS) & there, other=0)

    @gluon.jit
    def finish(self):
        """This CTA draws no more. The last one to say so leaves zeros behind."""
        if self.drawn:  # noqa: SIM102, known at compile time
            if gl.atomic_add(self.plan + FINISHED, 1) == gl.num_programs(0) - 1:
                gl.store(self.plan + DRAWN, 0)
                gl.store(self.plan + FINISHED, 0)

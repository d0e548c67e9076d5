"""The first tile of a dense CTA, loaded before the CTA has roles.

From a kernel's start to its roles it is a microsecond: forty barriers, a meeting of all warps, arguments and
instructions that come from memory. The copies of a tile's queries and its first block of keys and
values take longer than that, and four barriers are all that they need.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.tile.dependent import await_kernels_before
from rooftile.kernels.gluon.tile.divisor import divide_few
from rooftile.kernels.gluon.tile.mask import key_range
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS
from rooftile.kernels.gluon.tile.opaque import opaque
from rooftile.kernels.gluon.tile.ring import Fill, first_fill


@gluon.jit
def load_first_tile(
    q_desc,
    k_desc,
    v_desc,
    q_ring,
    k_ring,
    v_ring,
    num_heads,
    group_size,
    q_len,
    kv_len,
    q_tiles,
    num_rows_of_heads,
    section,
    left,
    right,
    groups: gl.constexpr,
    block: gl.constexpr,
    k_used: gl.constexpr,
    v_used: gl.constexpr,
    dependent: gl.constexpr,
    longest_first: gl.constexpr,
    has_left: gl.constexpr,
    has_right: gl.constexpr,
):
    """Starts the copies that the producer starts for other tiles, and initialises the barriers they signal.

    Which tile it is is `Problem.tile`'s answer, for the small numbers that first tiles have.
    """
    k_ring.start_full(0)
    v_ring.start_full(0)
    for group in gl.static_range(groups):
        q_ring.start_full(group)
    fence_async_shared()
    if dependent:
        await_kernels_before()
    # Opaque: else what producers work out once more is worked out for all roles at the kernel's start.
    heads_together, tiles, heads = opaque(section), opaque(q_tiles), opaque(num_heads)
    queries, keys = opaque(q_len), opaque(kv_len)
    t = gl.program_id(0)
    sections = divide_few(t, heads_together * tiles)
    first_head = sections * heads_together
    t -= first_head * tiles
    width = gl.minimum(heads_together, opaque(num_rows_of_heads) - first_head)
    m = divide_few(t, width)
    flat = first_head + t - m * width
    if longest_first:
        m = tiles - 1 - m
    batch = divide_few(flat, heads)
    head = flat - batch * heads
    kv_head = divide_few(head, opaque(group_size))
    row0 = m * (GROUP_ROWS * groups)
    first, blocks = key_range(
        row0, GROUP_ROWS * groups, queries, keys, left, right, block, has_left, has_right
    )
    fill = first_fill()
    for group in gl.static_range(groups):
        at = Fill(fill.stage + group, fill.phase)
        q_ring.load(at, q_desc, (batch, head, row0 + group * GROUP_ROWS, 0), k_used)
    row = (first + blocks - 1) * block
    k_ring.load(fill, k_desc, (batch, kv_head, row, 0), k_used)
    v_ring.load(fill, v_desc, (batch, kv_head, row, 0), v_used)

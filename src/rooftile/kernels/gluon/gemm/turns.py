"""Tiles of 64 rows: both consumer warpgroups multiply all of their columns, and take the steps in turn.

    acc = no_pieces(C)                                       # all columns of the tile
    turn = first_turn(group)
    acc, turn = multiply_in_turn(ring, acc, turn, steps, group, C)
    acc = trade(ring, acc, group, C)                         # half of the columns, all steps

With half of the columns each, every step would be four narrow products of each warpgroup, which wait for
each other and read the same rows: 64 x 48 took 285 clocks a step, of which the matrix unit works 96. In
turn there are half as many, of twice the columns, and the one multiplies while the other waits; more
than 64 columns gain nothing. A stage always belongs to the same warpgroup, so that nobody waits for a
phase that is two ahead: the ring has an even number of stages.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.accumulator import PIECE, add_pieces, settle_pieces
from rooftile.kernels.gluon.gemm.config import PIECE_BYTES
from rooftile.kernels.gluon.tile.barrier import meet
from rooftile.kernels.gluon.tile.mma import GROUP_ROWS, accumulator_layout
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import Fill


@record
class Turn:
    """at: the next fill of a warpgroup's own. odd: whether the next step of all is in an odd stage."""

    at: Fill
    odd: gl.tensor


@gluon.jit
def first_turn(group: gl.constexpr):
    return Turn(Fill(gl.to_tensor(group), gl.to_tensor(0)), gl.to_tensor(0))


@gluon.jit
def multiply_in_turn(ring, acc, turn, steps, group: gl.constexpr, C: gl.constexpr):
    """acc [64, C] plus this warpgroup's of the next `steps` steps, none of which is in flight any more."""
    at = turn.at
    mine = (steps + 1 - (turn.odd ^ group)) >> 1
    ready = ring.is_ready(at)
    for _ in range(mine):
        ring.arrived_unless(ready, at)
        acc = add_pieces(ring, acc, at, C)
        following = ring.after_two(at)
        ready = ring.is_ready(following)  # known when the products have ended
        # Nothing is kept in flight: the other warpgroup multiplies meanwhile, and stages are few.
        acc = settle_pieces(acc, 0, C)
        ring.release(at)
        at = following
    return acc, Turn(at, turn.odd ^ steps & 1)


_GIVE_ASM = gl.constexpr(
    "{ .reg .b32 at; mov.u32 at, %tid.x; and.b32 at, at, 127; shl.b32 at, at, 4; "
    "add.u32 at, at, $8; st.shared.v4.f32 [at], {$4, $5, $6, $7}; } mov.b32 $0, $8;"
)
_TAKE_ASM = gl.constexpr(
    "{ .reg .b32 at; mov.u32 at, %tid.x; and.b32 at, at, 127; shl.b32 at, at, 4; "
    "add.u32 at, at, $4; ld.shared.v4.f32 {$0, $1, $2, $3}, [at]; }"
)


@gluon.jit
def _give(x, address):
    """A piece, by threads that find it again where the other warpgroup's of the same number look."""
    places = gl.full([GROUP_ROWS, PIECE], address, gl.int32, accumulator_layout(PIECE))
    gl.inline_asm_elementwise(
        _GIVE_ASM, "=r,=r,=r,=r,f,f,f,f,r,r,r,r", [x, places], dtype=gl.int32, is_pure=False,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _take(address):
    places = gl.full([GROUP_ROWS, PIECE], address, gl.int32, accumulator_layout(PIECE))
    return gl.inline_asm_elementwise(
        _TAKE_ASM, "=f,=f,=f,=f,r,r,r,r", [places], dtype=gl.float32, is_pure=False, pack=4
    )


@gluon.constexpr_function
def _place(group, piece, pieces):
    """Bytes from the first piece that is handed over."""
    return (group * pieces + piece) * PIECE_BYTES


@gluon.jit
def trade(ring, acc, group: gl.constexpr, C: gl.constexpr):
    """This warpgroup's half of the columns, summed over both warpgroups' steps: pieces [64, C / 2]."""
    half: gl.constexpr = C // (2 * PIECE)
    for piece in gl.static_range(half):
        _give(acc[(1 - group) * half + piece], ring.traded() + _place(group, piece, half))
    meet()
    sums = ()
    for piece in gl.static_range(half):
        theirs = _take(ring.traded() + _place(1 - group, piece, half))
        sums = sums + (acc[group * half + piece] + theirs,)  # type: ignore  # noqa: RUF005
    meet()  # it may be written again
    return sums

"""Named barriers, and the ping-pong of warpgroups built on them.

    token-free use, in consumer GROUP of GROUPS:

    start_turns(GROUP, GROUPS)          # once, before the first turn
    for i in range(n):
        take_turn(GROUP, GROUPS)        # my warpgroup issues matrix products now ...
        s = multiply(q, k)
        pass_turn(GROUP, GROUPS)        # ... and now it is the next one's turn,
        p = softmax(wait(s))            # while this one is busy with exponentials

Every warpgroup takes the same number of turns. The barriers are the hardware's `bar.sync` and
`bar.arrive`; Triton numbers its own from 0, so these start at 8.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST_NAMED_BARRIER = gl.constexpr(8)
THREADS_OF_TWO_WARPGROUPS = 256


@gluon.constexpr_function
def _barrier_asm(kind):
    return f"bar.{kind} $1, {THREADS_OF_TWO_WARPGROUPS}; mov.b32 $0, $1;"


@gluon.jit
def _barrier(kind: gl.constexpr, group, groups: gl.constexpr):
    """The barrier of a group's turn; where `group` is a constant, so is the instruction's number."""
    gl.inline_asm_elementwise(
        _barrier_asm(kind),
        "=r,r",
        [gl.to_tensor(FIRST_NAMED_BARRIER + group % groups)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def start_turns(group, groups: gl.constexpr):
    """Gives the first turn to group 0."""
    if groups > 1:  # noqa: SIM102, known at compile time
        if group == groups - 1:
            _barrier("arrive", 0, groups)


@gluon.jit
def take_turn(group, groups: gl.constexpr):
    """Waits until the group before this one has passed the turn on."""
    if groups > 1:
        _barrier("sync", group, groups)


@gluon.jit
def pass_turn(group, groups: gl.constexpr):
    """Gives the turn to the next group, without waiting."""
    if groups > 1:
        _barrier("arrive", group + 1, groups)


@gluon.jit
def meet():
    """Two warpgroups wait for each other."""
    _barrier("sync", 0, 1)

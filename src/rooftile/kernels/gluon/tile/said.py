"""What a warpgroup's warps tell each other through shared memory that a kernel gives them.

    said = allocate_said(2, gl.int8)                        # of a kernel, for two groups
    mine = said.index(group)
    too_large = any_of(mine, total > limit)                 # [rows] to a number that all threads have
    first, before = add_once(counter, 1)
    last = any_of(mine, first & (before == parts - 1))      # what one thread found

A maximum over all warps, or an atomic of one number, would take memory that Triton allocates, of which there is
one piece for all consumers that share their code (tile/roles.py).
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(128)


@gluon.jit
def allocate_said(groups: gl.constexpr, dtype: gl.constexpr):
    """[groups, 4] integers in shared memory, one for each warp."""
    return gl.allocate_shared_memory(dtype, [groups, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def say(said, condition):
    """Each warp writes whether `condition` [rows] holds anywhere in its rows; it waits for nothing.

    said: [4] integers in shared memory, one a warp.
    """
    of_warps = gl.where(condition, 1, 0).reshape([4, condition.shape[0] // 4])
    said.store(gl.max(of_warps, 1).to(said.dtype))


@gluon.jit
def any_said(said):
    """Whether any of four warps has said so, behind a barrier."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all in every thread
    return gl.max(said.load(layout), 0) > 0


@gluon.jit
def any_of(said, condition):
    """Whether `condition` [rows] holds anywhere in a warpgroup's rows."""
    say(said, condition)
    gl.thread_barrier()
    return any_said(said)


@gluon.jit
def add_once(counter, value):
    """Adds `value` at a pointer to int32, once for a warpgroup, behind all that its threads have stored.

    Returns which thread did it, and what it found there, [128] each.
    """
    gl.thread_barrier()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, THREADS, layout)
    first = thread == 0
    values = gl.full([THREADS], value, gl.int32, layout)
    before = gl.atomic_add(counter + thread * 0, values, mask=first, sem="acq_rel", scope="gpu")
    return first, before

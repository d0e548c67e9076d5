"""Parts of tiles that go from the CTA that computed them to the one that finishes the tile.

Every CTA has a place for one part, and for each of its warpgroups a flag. The part is written with
plain stores; a barrier of the warpgroup and one release of the flag publish it; the reader polls
with acquire, all the flags that it waits for at a time. Every part has one reader, which puts the
flag back to 0: flags are 0 whenever no kernel uses them, so a CUDA graph can be replayed without
clearing them (kernels/flags.py).
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.gemm.problem import GROUPS
from rooftile.kernels.gluon.tile.mma import columns_of, rows_of

MOST_CTAS = gl.constexpr(256)  # of a launch, for which kernels/flags.py has flags


@gluon.jit
def _opaque(x):
    """x, of which the compiler cannot know that it is the same in every turn of a loop: it would
    compute the addresses of a part once, and keep them in local memory."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _addresses(problem, slot, size: gl.constexpr, column0: gl.constexpr, R: gl.constexpr,
               C: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Of C columns, from column0 on, of a part of `size` elements [R, ...].

    Column by column in eights, so that each access of a warp covers 256 bytes in one piece.
    """
    rows = gl.arange(0, R, rows_of(layout))
    columns = gl.arange(0, C, columns_of(layout))
    part = problem.parts + gl.cast(_opaque(slot), gl.int64) * size
    of_row = (rows // 16) * (size // R * 16) + (rows % 16) * 8
    of_column = column0 * 16 + (columns // 8) * 128 + columns % 8
    at = part + gl.expand_dims(of_row, 1) + gl.expand_dims(of_column, 0)
    return gl.max_contiguous(gl.multiple_of(at, [4, 32]), [1, 8])


@gluon.jit
def store_part(
    problem, acc, cta, group: gl.constexpr, rows_left, size: gl.constexpr, column0: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Writes this CTA's part of a tile, of `size` elements, for the CTA that finishes it: columns from
    column0 on, [R, C]. `publish` must follow."""
    slot = cta * GROUPS + group
    inside = gl.expand_dims(gl.arange(0, R, rows_of(layout)) < rows_left, 1)
    gl.store(_addresses(problem, slot, size, column0, R, C, layout), acc, mask=inside)


@gluon.jit
def publish(problem, cta, group: gl.constexpr):
    """Lets the CTA that finishes the tile read this one's part."""
    gl.thread_barrier()
    gl.atomic_xchg(problem.flags + cta * GROUPS + group, 1, sem="release", scope="gpu")


@gluon.jit
def await_parts(problem, cta, others, group: gl.constexpr):
    """Waits until the `others` CTAs before this one have published their parts.

    Every thread polls a flag or two of its own: one after another they would take a trip to the
    L2 cache each.
    """
    if others > 0:
        layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
        i = gl.arange(0, MOST_CTAS, layout)
        mine = i < others
        nothing = i * 0
        flags = (
            problem.flags
            + (cta - (1 + gl.minimum(i, others - 1)) * (problem.sharers * problem.across)) * GROUPS
            + group
        )
        seen = gl.atomic_add(flags, nothing, mask=mine, sem="acquire", scope="gpu")
        while gl.sum(seen * mine.to(gl.int32), 0) < others:
            seen = gl.atomic_add(flags, nothing, mask=mine, sem="acquire", scope="gpu")


@gluon.constexpr_function
def _together(R, C):
    """Parts that are read at a time, to the capacity of 64 registers a thread."""
    return max(64 * 128 // (R * C), 1)


@gluon.jit
def add_parts(
    problem, x, cta, others, group: gl.constexpr, rows_left, size: gl.constexpr,
    column0: gl.constexpr, R: gl.constexpr, C: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """x [R, C], columns from column0 on, plus the parts of the `others` CTAs before this one."""
    together: gl.constexpr = _together(R, C)
    inside = gl.expand_dims(gl.arange(0, R, rows_of(layout)) < rows_left, 1)
    for i in range(0, others, together):
        parts = ()
        for j in gl.static_range(together):
            slot = (cta - (1 + i + j) * (problem.sharers * problem.across)) * GROUPS + group
            at = _addresses(problem, slot, size, column0, R, C, layout)
            parts = parts + (gl.load(at, mask=inside & (i + j < others), other=0.0),)  # type: ignore  # noqa: RUF005
        for j in gl.static_range(together):
            x += parts[j]
    return x


@gluon.jit
def give_back(problem, cta, others, group: gl.constexpr):
    """The parts of the `others` CTAs before this one have been read."""
    for i in range(others):
        gl.store(
            problem.flags + (cta - (1 + i) * (problem.sharers * problem.across)) * GROUPS + group, 0
        )

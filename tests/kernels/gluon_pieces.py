"""Small kernels that use one piece of the tile layer each (test_gluon_template.py)."""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.record import record
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.roles import specialize, warpgroup
from rooftile.kernels.gluon.tile.said import add_once, allocate_said, any_of
from rooftile.kernels.gluon.tile.schedule import new_queue


@record
class Interval:
    start: gl.tensor
    length: gl.tensor
    closed: gl.constexpr

    @gluon.jit
    def end(self):
        if self.closed:
            return self.start + self.length - 1
        else:
            return self.start + self.length


@gluon.jit
def ends(out, closed: gl.constexpr):
    gl.store(out, Interval(gl.program_id(0) * 10, 4, closed).end())


@gluon.jit
def _draw(queue, num_tiles):
    at = first_fill()
    t = gl.program_id(0)
    while t < num_tiles:
        following = queue.draw(t)
        queue.send(at, (1, t, t * t))
        at = queue.after(at)
        t = following
    queue.finish()
    queue.send(at, (0, 0, 0))


@gluon.jit
def _count(queue, seen, squares, num_tiles, group: gl.constexpr):
    at = first_fill()
    queue.arrived(at)
    while queue.field(at, 0) > 0:
        t = queue.field(at, 1)
        square = queue.field(at, 2)
        queue.release(at)
        gl.atomic_add(seen + group * num_tiles + t, 1)
        gl.store(squares + t, square)
        at = queue.after(at)
        queue.arrived(at)
    queue.release(at)


@gluon.jit
def count_tiles(counter, seen, squares, num_tiles, dynamic: gl.constexpr):
    """Two consumers count, for each tile, how often they are told about it."""
    queue = new_queue(counter, 3, 2, dynamic)
    gl.warp_specialize(
        [
            (_count, (queue, seen, squares, num_tiles, gl.constexpr(0))),
            (_count, (queue, seen, squares, num_tiles, gl.constexpr(1))),
            (_draw, (queue, num_tiles)),
        ],
        [4, 1],
        [24, 24],
    )


@gluon.jit
def _tell(
    x, counters, out, rounds, limit, said, groups: gl.constexpr, sums: gl.constexpr,
    of_group: gl.constexpr,
):  # fmt: skip
    group = warpgroup(of_group, groups)
    start_turns(group, groups)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, 128, layout)
    for i in range(rounds):
        at = (i * groups + group) * 128 + thread
        value = gl.load(x + at)
        take_turn(group, groups)
        high = any_of(said.index(group), value > limit)
        pass_turn(group, groups)
        first, before = add_once(counters + group, 1)
        last = any_of(said.index(group), first & (before == rounds - 1))
        if high:
            value = value + 1000
        if last:
            value = value + 10000
        if sums:
            value = value + gl.sum(value, 0)
        gl.store(out + at, value)


@gluon.jit
def _count_turns(out, rounds):
    gl.store(out, rounds)


@gluon.jit
def tell(
    x, counters, out, turns, rounds, limit, groups: gl.constexpr, one_copy: gl.constexpr,
    sums: gl.constexpr,
):  # fmt: skip
    """Each of `groups` warpgroups adds 1000 to a row of x [rounds, groups, 128] with a number above `limit`,
    and 10000 to its last one, which it knows by counting. sums: what consumers in one copy may not."""
    said = allocate_said(groups, gl.int8)
    specialize(
        _tell,
        (x, counters, out, rounds, limit, said, groups, sums),
        groups,
        64,
        [(_count_turns, (turns, rounds))],
        24,
        one_copy,
    )

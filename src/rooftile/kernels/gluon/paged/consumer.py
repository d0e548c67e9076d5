"""The consumers' role: a warpgroup that attends with 64 packed rows of an item."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from rooftile.kernels.gluon.attention.consumer import attend_in_order, hide, next_block
from rooftile.kernels.gluon.paged.again import attend_again
from rooftile.kernels.gluon.paged.join import arrive_last, join_parts
from rooftile.kernels.gluon.paged.rows import clear_padding, loading_layout, store_lse, store_rows
from rooftile.kernels.gluon.paged.work import (
    END_ROW,
    FIRST_PART,
    FIRST_ROW,
    HEAD,
    JOINED_BY,
    KEYS,
    LAST,
    MERGE_WORDS,
    MORE,
    OF_REQUEST,
    PARTS,
    QUERIES,
    SLOT,
    TILES,
    TOKEN,
)
from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.mma import (
    GROUP_ROWS,
    accumulator_layout,
    columns_of,
    left_operand_layout,
    multiply,
    narrow,
    rows_of,
    wait,
)
from rooftile.kernels.gluon.tile.pages import packed_corner
from rooftile.kernels.gluon.tile.ring import first_fill
from rooftile.kernels.gluon.tile.roles import warpgroup
from rooftile.kernels.gluon.tile.said import any_of
from rooftile.kernels.gluon.tile.softmax import (
    OnlineSoftmax,
    in_parts,
    overflowed,
    soft_cap,
    start_softmax,
    start_softmax_at_sink,
)
from rooftile.kernels.triton_version import tma_store_wait


@gluon.jit
def _load_queries(work, q_tile, first_row, end_row, token, kv_head, k_dim: gl.constexpr):
    """Gathers packed rows into shared memory; rows from end_row on become zeros."""
    L: gl.constexpr = loading_layout(k_dim)
    row = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, L))
    column = gl.arange(0, k_dim, gl.SliceLayout(0, L))
    at_token = (token + row // work.heads_of_group()).to(gl.int64) * work.q_stride
    at_head = (kv_head * work.heads_of_group() + row % work.heads_of_group()) * work.q_head_stride
    at = work.q + gl.expand_dims(at_token + at_head, 1) + gl.expand_dims(column, 0)
    there = gl.expand_dims(row < end_row, 1) & gl.expand_dims(column < work.k_width_of_8 * 8, 0)
    q_tile.store(gl.load(gl.multiple_of(at, [1, 16]), mask=there, other=0.0))
    fence_async_shared()


@gluon.jit
def _next_queries(work, q_ring, q_fill, turn, group):
    """Gives the tile of queries back and waits for the next rotation: its fill, the turn after it."""
    q_ring.release(q_fill)
    following = work.q_fill(turn, group)
    q_ring.arrived(following)
    return following, work.next_q(turn)


@gluon.jit
def _whole_tiles(work, first_row, end_row, offset, kv_len):
    """KV tiles low .. high - 1 are seen whole by each of the packed rows; others need a mask."""
    low = 0
    end = kv_len
    if work.has_right:
        end = gl.minimum(end, first_row // work.heads_of_group() + offset + work.right + 1)
    if work.has_left:
        last_token = (end_row - 1) // work.heads_of_group()
        low = gl.cdiv(gl.maximum(last_token + offset - work.left, 0), work.block)
    return low, gl.maximum(end, 0) // work.block


@gluon.jit
def _anchor(work, first_row, offset, kv_len):
    """KV tiles before this one are weighed under the maximum of those that came before them: it has the
    last key that the first row sees."""
    end = kv_len
    if work.has_right:
        end = gl.minimum(end, first_row // work.heads_of_group() + offset + work.right + 1)
    return gl.maximum(end - 1, 0) // work.block


@gluon.jit
def _again(
    work,
    queue,
    slot,
    q,
    outs,
    dtype: gl.constexpr,
    group,
    S: gl.constexpr,
    O: gl.constexpr,  # noqa: E741
):
    """Output, reciprocal sums and lse of an item that `attend_again` attends.

    What the item is comes from its message once more: the loops have no registers to keep it in.
    """
    first_row = queue.field(slot, FIRST_ROW) + group * GROUP_ROWS
    o, maximum, total = attend_again(
        work, q, outs.ring.buffers.index(group), queue.field(slot, OF_REQUEST), queue.field(slot, LAST),
        queue.field(slot, TILES), first_row, queue.field(slot, END_ROW), queue.field(slot, SLOT),
        queue.field(slot, HEAD), queue.field(slot, QUERIES), queue.field(slot, KEYS), dtype,
        outs.columns,
    )  # fmt: skip
    softmax = OnlineSoftmax(
        gl.convert_layout(maximum, rows_of(S)), gl.convert_layout(total, rows_of(S))
    )
    return o, gl.convert_layout(softmax.reciprocal(), rows_of(O)), softmax.lse()


@gluon.jit
def _message(queue, slot):
    """What a warpgroup has to know of an item before it begins."""
    return (
        queue.field(slot, MORE),
        queue.field(slot, TILES),
        queue.field(slot, LAST),
        queue.field(slot, FIRST_ROW),
        queue.field(slot, END_ROW),
        queue.field(slot, QUERIES),
        queue.field(slot, KEYS),
    )


@gluon.jit
def attend_items(
    work,
    queue,
    o_desc,
    q_ring,
    k_ring,
    v_ring,
    outs,
    group: gl.constexpr,
):
    """One consumer warpgroup: packed rows group * 64 .. group * 64 + 63 of every item."""
    number = warpgroup(group, work.groups)
    if group <= 0:  # noqa: SIM102, it is 0, or not known at compile time
        if number == 0:
            clear_padding(work)
    start_turns(number, work.turns)
    # Apart: translated once for all groups, also where each has a copy of its own.
    _attend_items(work, queue, o_desc, q_ring, k_ring, v_ring, outs, number)


@gluon.jit
def _attend_items(work, queue, o_desc, q_ring, k_ring, v_ring, outs, group):
    block: gl.constexpr = work.block
    k_dim: gl.constexpr = k_ring.columns
    v_dim: gl.constexpr = v_ring.columns
    dtype: gl.constexpr = q_ring.ring.buffers.dtype
    S: gl.constexpr = accumulator_layout(block)
    O: gl.constexpr = accumulator_layout(v_dim)  # noqa: E741
    columns = gl.arange(0, block, columns_of(S))
    # Where no output takes the place of queries, they are given back under the last product.
    gives_early: gl.constexpr = (
        work.packed > 0 and work.overlapped and (work.q_with_values or work.own_output)
    )

    fill = first_fill()
    v_fill = first_fill()
    slot = first_fill()
    turn = first_fill()
    queue.arrived(slot)
    more, tiles, last, item_row, end_row, q_len, kv_len = _message(queue, slot)
    while more > 0:
        offset = kv_len - q_len
        first_row = item_row + group * GROUP_ROWS
        rows = first_row + gl.arange(0, GROUP_ROWS, rows_of(S))
        q_fill = work.q_fill(turn, group)
        if work.packed > 0:
            q_ring.arrived(q_fill)
            turn = work.next_q(turn)
        rotation = 0
        border = 0
        if work.rotations > 1:
            rotation, border = work.first_rotation(last, kv_len)
        if first_row >= end_row:
            # Nothing of this item is this group's.
            for i in range(tiles):
                if work.rotations > 1 and work.packed > 0:  # noqa: SIM102
                    if last - i < border:
                        rotation, border = work.next_rotation(rotation, border)
                        q_fill, turn = _next_queries(work, q_ring, q_fill, turn, group)
                take_turn(group, work.turns)
                pass_turn(group, work.turns)
                k_ring.arrived(fill)
                k_ring.release(fill)
                v_ring.arrived(v_fill)
                v_ring.release(v_fill)
                fill = k_ring.after(fill)
                v_fill = v_ring.after(v_fill)
            if gives_early:
                q_ring.release(q_fill)
            following = queue.after(slot)
            if work.reads_ahead:
                queue.arrived(following)
                more, tiles, last, item_row, end_row, q_len, kv_len = _message(queue, following)
        else:
            q = q_ring.tile(q_fill)
            if work.packed == 0:
                rotated = queue.field(slot, TOKEN) + rotation * work.tokens
                kv_head = queue.field(slot, HEAD)
                _load_queries(work, q, first_row, end_row, rotated, kv_head, k_dim)
            if work.has_sink:
                kv_head = queue.field(slot, HEAD)
                head = kv_head * work.heads_of_group() + rows % work.heads_of_group()
                whole = queue.field(slot, SLOT) < 0
                sinks = gl.load(
                    work.sink + head, mask=(rows < end_row) & whole, other=float("-inf")
                )
                softmax = start_softmax_at_sink(sinks, GROUP_ROWS, rows_of(S))
            else:
                softmax = start_softmax(GROUP_ROWS, rows_of(S))
            if not work.overlapped:
                o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
                if work.sums_in_parts:
                    softmax = in_parts(softmax, GROUP_ROWS)
                low, high = _whole_tiles(work, first_row, end_row, offset, kv_len)
                anchor = _anchor(work, first_row, offset, kv_len)
                positions = rows // work.heads_of_group()
                if work.rotations == 1:
                    o, softmax, fill = attend_in_order(
                        work, q, k_ring, v_ring, fill, tiles, last, softmax, positions, columns,
                        low, high, offset, kv_len, first_row, None, 0, 0, anchor, dtype, S, O,
                        False, o, True,
                    )  # fmt: skip
                else:
                    first_tile = last + 1 - tiles
                    for run in range(work.runs(rotation, first_tile, kv_len)):
                        if run > 0:
                            rotation, border = work.next_rotation(rotation, border)
                            if work.packed > 0:
                                q_fill, turn = _next_queries(work, q_ring, q_fill, turn, group)
                            else:
                                rotated = queue.field(slot, TOKEN) + rotation * work.tokens
                                kv_head = queue.field(slot, HEAD)
                                _load_queries(work, q, first_row, end_row, rotated, kv_head, k_dim)
                        q = q_ring.tile(q_fill)
                        run_begin = gl.maximum(border, first_tile)
                        o, softmax, fill = attend_in_order(
                            work, q, k_ring, v_ring, fill, last + 1 - run_begin, last, softmax,
                            positions, columns, low, high, offset, kv_len, first_row, None, 0, 0,
                            anchor, dtype, S, O, False, o, True,
                        )  # fmt: skip
                        last = run_begin - 1
                softmax = softmax.joined(rows_of(S))
                v_fill = fill  # both rings have as many stages
                inverse = gl.convert_layout(softmax.reciprocal(), rows_of(O))
                lse = softmax.lse(fast=True)
                if work.anchored:  # noqa: SIM102, known at compile time
                    if any_of(work.said.index(group), overflowed(softmax.total)):
                        o, inverse, lse = _again(
                            work, queue, slot, q_ring.tile(q_fill), outs, dtype, group, S, O
                        )
            elif tiles > 0:
                # The first tile, the last of the keys: nothing to overlap it with.
                k_ring.arrived(fill)
                take_turn(group, work.turns)
                s = gl.zeros([GROUP_ROWS, block], gl.float32, S)
                s = multiply(q, k_ring.tile(fill).permute((1, 0)), s, use_acc=False)
                pass_turn(group, work.turns)
                s = wait(0, deps=[s])
                k_ring.release(fill)
                factor = work.factor
                if work.has_softcap:
                    s = soft_cap(s, work.factor, work.softcap)
                    factor = 1.0
                low, high = _whole_tiles(work, first_row, end_row, offset, kv_len)
                anchor = _anchor(work, first_row, offset, kv_len)
                positions = rows // work.heads_of_group()
                if (last < low) | (last >= high):
                    s = hide(work, s, positions, last * block, columns, offset, kv_len)
                p, _alpha, softmax = softmax.step(s, factor, work.lazy, work.software_share)
                weights = gl.convert_layout(narrow(p, dtype), left_operand_layout(O))
                o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
                fill = k_ring.after(fill)
                follows = tiles > 1
                if work.rotations > 1:
                    follows = follows & (last - 1 >= border)
                k_ring.arrived(fill, pred=follows)
                for i in range(1, tiles):
                    if work.rotations > 1:  # noqa: SIM102, the first is known at compile time
                        if last - i < border:
                            rotation, border = work.next_rotation(rotation, border)
                            if work.packed > 0:
                                q_fill, turn = _next_queries(work, q_ring, q_fill, turn, group)
                            else:
                                rotated = queue.field(slot, TOKEN) + rotation * work.tokens
                                kv_head = queue.field(slot, HEAD)
                                _load_queries(work, q, first_row, end_row, rotated, kv_head, k_dim)
                            k_ring.arrived(fill)
                    follows = i + 1 < tiles
                    if work.rotations > 1:
                        # The next rotation may come before the keys: it needs this one's place.
                        follows = follows & (last - i - 1 >= border)
                    q = q_ring.tile(q_fill)
                    o, weights, softmax, fill = next_block(
                        work,
                        q,
                        k_ring,
                        v_ring,
                        fill,
                        v_fill,
                        follows,
                        o,
                        weights,
                        softmax,
                        positions,
                        columns,
                        last - i,
                        low,
                        high,
                        offset,
                        kv_len,
                        group,
                        S,
                        O,
                        anchored=work.anchored,
                        anchor=anchor,
                    )
                    v_fill = v_ring.after(v_fill)
                v_ring.arrived(v_fill)
                o = multiply(weights, v_ring.tile(v_fill), o)
                # Under the last product: what the sums of weights say, and what the next item is. A wait for
                # a message, which has long arrived, ends the basic block: ptxas would hold the product back.
                following = queue.after(slot)
                if work.reads_ahead:
                    queue.arrived(following)
                    more, tiles, last, item_row, end_row, q_len, kv_len = _message(queue, following)
                else:
                    queue.arrived(slot)
                too_large = False
                if work.anchored:
                    too_large = any_of(work.said.index(group), overflowed(softmax.total))
                if gives_early:
                    # The next item's may come. A second pass needs these; it comes to its end without.
                    q_ring.release_where(q_fill, not too_large)
                inverse = gl.convert_layout(softmax.reciprocal(), rows_of(O))
                lse = softmax.lse(fast=True)
                o, weights, inverse, lse = wait(0, deps=[o, weights, inverse, lse])
                v_ring.release(v_fill)
                v_fill = v_ring.after(v_fill)
                if work.anchored:  # noqa: SIM102, known at compile time
                    if too_large:
                        o, inverse, lse = _again(
                            work, queue, slot, q_ring.tile(q_fill), outs, dtype, group, S, O
                        )
                        if gives_early:
                            q_ring.release(q_fill)
            else:
                if gives_early:
                    q_ring.release(q_fill)
                following = queue.after(slot)
                if work.reads_ahead:
                    queue.arrived(following)
                    more, tiles, last, item_row, end_row, q_len, kv_len = _message(queue, following)
                o = gl.zeros([GROUP_ROWS, v_dim], gl.float32, O)
                inverse = gl.convert_layout(softmax.reciprocal(), rows_of(O))
                lse = softmax.lse(fast=True)
            o = o * gl.expand_dims(inverse, 1)
            # What the item is, from its message once more, for the same reason.
            tile_row = queue.field(slot, FIRST_ROW)
            first_row = tile_row + group * GROUP_ROWS
            rows = first_row + gl.arange(0, GROUP_ROWS, rows_of(S))
            stop_row = queue.field(slot, END_ROW)
            part = queue.field(slot, SLOT)
            token = queue.field(slot, TOKEN)
            kv_head = queue.field(slot, HEAD)
            if work.packed > 0 and part < 0:
                # Through shared memory of its own where there is room, else in the place of its queries.
                place = group if work.own_output else q_fill.stage
                if work.own_output:
                    tma_store_wait(0)
                outs.ring.buffers.index(place).store(o.to(dtype))
                fence_async_shared()
                token0 = first_row // work.packed
                corner = packed_corner(
                    kv_head * work.packed, token, queue.field(slot, QUERIES), token0
                )
                outs.put(place, o_desc, corner)
                store_lse(work, lse, rows, stop_row, token, kv_head)
            else:
                store_rows(work, o, lse, tile_row, rows, stop_row, part, token, kv_head, O)
                merge = queue.field(slot, JOINED_BY)
                if merge >= 0:
                    words = work.plan + work.merges_at + merge * MERGE_WORDS
                    parts = gl.load(words + PARTS)
                    if arrive_last(work, merge, parts, group):
                        first = gl.load(words + FIRST_PART) + group * GROUP_ROWS
                        ends = gl.minimum(stop_row, first_row + GROUP_ROWS)
                        join_parts(
                            work, first, parts, first_row, ends, token, kv_head, GROUP_ROWS, v_dim
                        )
        if work.packed > 0:
            if not work.own_output:
                tma_store_wait(0)
            if not gives_early:
                q_ring.release(q_fill)
        queue.release(slot)
        slot = queue.after(slot)
        if not work.reads_ahead:
            queue.arrived(slot)
            more, tiles, last, item_row, end_row, q_len, kv_len = _message(queue, slot)
    if work.packed > 0:
        tma_store_wait(0)

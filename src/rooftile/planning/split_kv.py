"""Splitting paged attention over the CTAs of a GPU: the specification of the plan.

`plan` is pure Python and says what every planner must compute; `kernels/triton/split_kv.py`
computes the same numbers on the GPU from device-resident lengths. All of it is integers.

**Rows.** Query heads that share a kv head are packed into the rows of one matrix: packed row i of
(request, kv head) is query token `i // group_size`, query head `kv_head * group_size + i %
group_size`. A request has `q_len * group_size` packed rows, cut into query tiles of one size: the
smallest of `tile_rows` that holds them all, else the largest.

**KV tiles.** Keys are counted in tiles of `kv_tile` tokens at multiples of `kv_tile` from the first
key of the request, whatever the page size. A query tile needs the tiles from that of the first key
that any of its rows may see to that of the last one (causal and window bounds as in the operator);
a tile that sees nothing needs none.

**Strips, items, shares.** A strip is (request, query tile, kv head), in this order, the last query tile first, and costs
`item_cost` + (its KV tiles) x `tile_cost` of its size, in clocks. All strips end to end are a line, cut
into equal shares for the CTAs in use; a cut moves to the nearest border of a KV tile, or of the
strip where less than `min_piece` tiles would remain on a side. What a CTA has of a strip is an item.
Each CTA has a contiguous run of items; every strip has at least one item, so every output row is
written by somebody. As few CTAs are used as gives each `item_cost + min_piece * tile_cost[0]` of work.

**Whole strips** (`whole` > 0, without fixed pieces and groups). Where `whole` of the costliest strip fit
into each CTA's share, no strip is cut: CTA 0 is given all of them, and the header says how many. Whoever
runs the plan lets CTAs draw them one at a time, in order. CTAs then work at the same time on strips that
stand next to each other, which see the same keys: these are read from memory once. `together` requests
at a time, counted from the end of the capacity, stand side by side, query tile by query tile from the end:
the cheap strips of all of them come last, so little remains to be balanced.

**Fixed pieces** (`piece` > 0, batch-invariant): each strip is cut at multiples of `piece` KV tiles
and nowhere else, so what is summed in which order depends on the request alone. A request's
strips then all have the pieces from the one of the first key that its first query sees to the
last; a piece that a query tile does not see is an item without KV tiles. In the order of the line
pieces vary fastest.

**Partial results.** The items of a strip in one item write the output (partial_row -1). Others
write to rows `partial_row ...` of float32 buffers: the normalised output [partial_rows, v_dim] and
natural-log lse [partial_rows], -inf and zeros where a row saw nothing, without the sink. Parts of a
strip lie `row_stride` rows apart, first keys first, and are merged in this order; the merge adds
the sink.

**Shared prefixes** (`groups` > 0: without fixed pieces and left window, and no request has more rows than
the largest query tile). Group g is requests first[g] .. first[g + 1] - 1, which begin with the same
shared[g] keys. Rounded down to KV tiles, the group attends these once where that spares reading at
least `least_saved` keys: (members - 1) x keys. Its strips, (group, kv head, query tile, the first of these first), follow those of
all requests. Their rows are those of all members' query tokens, their items name the first member as
the request (whose pages they are), as q_len the members' query tokens together, and as kv_len the
shared keys and q_len more, so that a causal mask hides nothing. Members' strips begin behind the
shared keys. Every strip of such a group and of its members has parts: one in one item has its only part
at row `partial_rows of cuts` + (requests: 0, groups: tokens x query heads) + kv_head x tokens x
group_size + (q_begin x group_size + row_begin). Each strip, in the order of the line, has a `Shared`
in the place of `Merge`s. No strip can be merged for itself: an item's `merge` says who else reads its keys,
nobody (-1), a group's other query tiles at any time (-2), or up to `MOST_TOGETHER` of them, which CTAs next to
this one have at the same time (-3).

**The buffer.** A plan is one int32 buffer, sized by `Layout(spec)` from capacities alone, so that a
captured CUDA graph can hold it while lengths change. Sections, each at a multiple of 32 words:

    header  [8]                  merges in use, items in use, CTAs in use, strips, strips of requests
                                 (where prefixes are shared, else 0), strips to be drawn, and two
                                 counters of whoever draws them: 0
    ctas    [num_ctas, 2]        first item, number of items (0: idle)
    merges  [merge_capacity, 8]  `Merge`; those from header[0] on are undefined
    items   [item_capacity, 12]  `Item`; those outside all CTAs' runs are undefined

CTA c's items begin at index (strip of its first item) + c: it needs no count of earlier items, and
leaves an unused index where a cut falls between two strips. Query tokens from
cu_seqlens_q[batch] on are padding, in no item: whoever runs the plan writes 0 and -inf there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rooftile.planning.split_shares import MOST_TOGETHER, Shares
from rooftile.planning.split_strips import Strip, strips
from rooftile.types import SplitSpec

HEADER_WORDS = 8
CTA_WORDS = 2
MOST_SHARING = 2048  # requests and groups, where prefixes are shared
ALIGNMENT = 32  # words: sections begin at cache lines


class Item(NamedTuple):
    """One CTA's part of a strip, as 12 words of the buffer."""

    request: int
    kv_head: int
    row_begin: int  # packed rows of the request
    row_end: int
    tile_rows: int  # size of the query tile: row_end - row_begin rounded up to one of the spec's
    kv_begin: int  # KV tiles; equal: nothing is seen
    kv_end: int
    partial_row: int  # -1: the item is its whole strip and writes the output
    merge: int  # index of the strip's merge, -1 where there is none; of a group -2 or -3
    q_begin: int  # cu_seqlens_q[request]
    q_len: int
    kv_len: int


class Merge(NamedTuple):
    """A strip in several parts, as 8 words of the buffer."""

    arrived: int  # 0; a kernel whose last part to arrive joins them counts here, back to 0 again
    kv_head: int
    row_begin: int
    row_end: int
    partial_row: int  # of the first part
    parts: int
    row_stride: int
    q_begin: int


class Shared(NamedTuple):
    """What is to be merged of a strip where requests share prefixes, as 8 words of the buffer.

    Of a group's strip: its own parts, from which its members' rows take theirs.
    """

    prefix: int  # index of its group's first query tile with the same kv head; -1: none
    kv_head: int
    group_row: int  # which packed row of the group its first row is; of a group's strip row_begin
    rows: int
    partial_row: int  # of the first part, -1 where there is none
    parts: int  # 0: its only item writes the output
    tile_rows: int  # of its group's strips
    q_begin: int


@dataclass(frozen=True)
class Plan:
    """ctas: (first index of items, number). items: `None` where an index is not used."""

    ctas: list[tuple[int, int]]
    items: list[Item | None]
    merges: list[Merge] | list[Shared]
    ctas_used: int
    strips: int
    request_strips: int = 0  # where prefixes are shared
    drawn: int = 0  # strips that CTAs draw, all of them CTA 0's

    def of_cta(self, cta: int) -> list[Item]:
        first, count = self.ctas[cta]
        return [item for item in self.items[first : first + count] if item is not None]

    def words(self, spec: SplitSpec) -> list[int]:
        """The buffer; what is undefined is -1."""
        layout = Layout(spec)
        words = [-1] * layout.size
        used = sum(count for _, count in self.ctas)
        header = [len(self.merges), used, self.ctas_used, self.strips, self.request_strips]
        words[:HEADER_WORDS] = [*header, self.drawn, 0, 0]
        rows: list[tuple[int, Sequence[tuple[int, ...] | None]]] = [
            (layout.ctas, self.ctas),
            (layout.merges, self.merges),
            (layout.items, self.items),
        ]
        for at, section in rows:
            for index, row in enumerate(section):
                if row is not None:
                    words[at + index * len(row) : at + (index + 1) * len(row)] = row
        return words


@dataclass(frozen=True)
class Layout:
    """Capacities and offsets (in int32 words) of a plan's buffer, from the spec alone."""

    spec: SplitSpec

    @cached_property
    def max_pieces(self) -> int:
        """Parts that fixed pieces cut a strip into, at most; 1 without."""
        spec = self.spec
        return max(1, -(-spec.max_kv_len // (spec.kv_tile * spec.piece))) if spec.piece else 1

    @cached_property
    def query_tiles(self) -> int:
        """Query tiles of all requests and one kv head."""
        spec = self.spec
        largest, requests = spec.tile_rows[-1], min(spec.batch, spec.tokens)
        of_one = -(-spec.max_q_len * spec.group_size // largest)
        of_all = spec.tokens * spec.group_size // largest
        of_groups = min(spec.groups, spec.tokens) + of_all if spec.groups else 0
        return min(requests + of_all, requests * of_one) + of_groups

    @property
    def entries(self) -> int:
        """Strips of one kv head (pieces of strips, where they are fixed)."""
        return self.query_tiles * self.max_pieces

    @property
    def item_capacity(self) -> int:
        return self.entries * self.spec.num_kv_heads + self.spec.num_ctas

    @property
    def merge_capacity(self) -> int:
        strips = self.query_tiles * self.spec.num_kv_heads
        if self.spec.groups:
            return strips
        if self.spec.piece:
            return strips if self.max_pieces > 1 else 0
        return min(self.spec.num_ctas - 1, strips)

    @property
    def partial_rows(self) -> int:
        """Rows of the partial buffers."""
        spec = self.spec
        only_parts = 2 * spec.tokens * spec.group_size * spec.num_kv_heads if spec.groups else 0
        return self.cut_rows + only_parts

    @property
    def cut_rows(self) -> int:
        """Those of strips that are cut."""
        spec = self.spec
        if spec.piece:
            parts = self.entries * spec.num_kv_heads if self.max_pieces > 1 else 0
        else:
            parts = 2 * (spec.num_ctas - 1)  # a cut begins one part, and ends another at most
        return parts * spec.tile_rows[-1]

    @property
    def ctas(self) -> int:
        return ALIGNMENT

    @property
    def merges(self) -> int:
        return self.ctas + _aligned(self.spec.num_ctas * CTA_WORDS)

    @property
    def items(self) -> int:
        return self.merges + _aligned(self.merge_capacity * len(Merge._fields))

    @property
    def size(self) -> int:
        return self.items + _aligned(self.item_capacity * len(Item._fields))


def _aligned(words: int) -> int:
    return -(-words // ALIGNMENT) * ALIGNMENT


def defined(words: Sequence[int], spec: SplitSpec) -> list[Sequence[int]]:
    """The parts of a buffer that its readers may look at, but for counters."""
    layout = Layout(spec)
    merges = words[layout.merges : layout.merges + len(Merge._fields) * words[0]]
    ctas = words[layout.ctas : layout.ctas + CTA_WORDS * spec.num_ctas]
    parts = [words[:6], ctas, merges]
    for first, count in zip(ctas[::2], ctas[1::2], strict=True):
        begin = layout.items + len(Item._fields) * first
        parts.append(words[begin : begin + len(Item._fields) * count])
    return parts


def plan(
    spec: SplitSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    first: Sequence[int] = (),
    shared: Sequence[int] = (),
) -> Plan:
    """The plan of one batch. Requests with q_len 0 have no items.

    first [groups + 1], shared [groups]: requests and keys of prefixes, as in `types.PrefixGroups`.

    Raises:
        ValueError: lengths beyond the spec's capacities.
    """
    _check(spec, q_lens, kv_lens, shared)
    line = strips(spec, q_lens, kv_lens, first, shared)
    total = sum(strip.cost for strip in line)
    least = spec.item_cost + spec.min_piece * spec.tile_cost[0]
    used = min(spec.num_ctas, max(1, total // least))
    drawn = len(line) if _whole(spec, line, total) else 0
    if drawn:
        used = 1
        line.sort(
            key=lambda strip: (
                -((spec.batch - 1 - strip.request) // spec.together),
                -strip.query_tile,
            )
        )
    shares = Shares(spec, line, total, used)
    cuts = shares.cuts()

    # Parts: the whole of a strip, or where cuts are inside of it, what lies between them.
    ctas: list[tuple[int, int]] = []
    items: list[Item | None] = [None] * (len(line) + spec.num_ctas)
    merges: list[Merge] = []
    parts: dict[int, list[int]] = {}  # strip: rows of its parts
    slots = 0
    for cta in range(spec.num_ctas):
        (begins, inside), (last, rest) = cuts[cta], cuts[cta + 1]
        end = last + (rest > 0)
        # The cuts at both ends may be the same: then there is nothing between them.
        ctas.append((begins + cta, end - begins if (begins, inside) < (last, rest) else 0))
        for index in range(begins, begins + ctas[-1][1]):
            strip = line[index]
            begin = strip.kv_begin + (inside if index == begins else 0)
            stop = strip.kv_begin + rest if index == last else strip.kv_end
            partial_row, merge = -1, -1
            if (begin, stop) != (strip.kv_begin, strip.kv_end) or strip.pieces > 1:
                partial_row = slots * spec.tile_rows[-1]
                slots += 1
                if not spec.groups:
                    if strip.piece == 0 and begin == strip.kv_begin:
                        merges.append(
                            Merge(0, strip.kv_head, strip.row_begin, strip.row_end, partial_row, 0,
                                  spec.tile_rows[-1], strip.queries.q_begin)
                        )  # fmt: skip
                    merge = len(merges) - 1
                    merges[merge] = merges[merge]._replace(parts=merges[merge].parts + 1)
            elif strip.queries.group >= 0:
                partial_row = _only_part(spec, strip)
            if partial_row >= 0:
                parts.setdefault(index, []).append(partial_row)
            items[index + cta] = Item(
                strip.request, strip.kv_head, strip.row_begin, strip.row_end, strip.tile_rows,
                begin, stop, partial_row, _reread(spec, strip, shares) or merge, strip.queries.q_begin,
                strip.queries.q_len, strip.queries.kv_len,
            )  # fmt: skip
    ctas = [ctas[shares.of_cta(cta)] for cta in range(spec.num_ctas)]
    if not spec.groups:
        return Plan(ctas, items, merges, used, len(line), drawn=drawn)
    requests = sum(not strip.queries.shared for strip in line)
    return Plan(ctas, items, _shared(spec, line, parts), used, len(line), requests)


def _reread(spec: SplitSpec, strip: Strip, shares: Shares) -> int:
    """How a group's keys are read again, 0 of a request's."""
    if not strip.queries.shared:
        return 0
    tiles = -(-strip.queries.q_len * spec.group_size // strip.tile_rows)
    return -3 if shares.are_whole(strip) and tiles <= MOST_TOGETHER else -2


def _only_part(spec: SplitSpec, strip: Strip) -> int:
    """Where the only part of a strip lies: every row has a place of its own, kept by its head."""
    heads = spec.num_kv_heads * (strip.queries.shared > 0) + strip.kv_head
    row = strip.queries.q_begin * spec.group_size + strip.row_begin
    return Layout(spec).cut_rows + heads * spec.tokens * spec.group_size + row


def _shared(spec: SplitSpec, line: list[Strip], parts: dict[int, list[int]]) -> list[Shared]:
    prefixes = {
        (strip.queries.group, strip.kv_head): index
        for index, strip in enumerate(line)
        if strip.queries.shared and not strip.query_tile
    }
    found = []
    for index, strip in enumerate(line):
        prefix, group_row, tile_rows = -1, strip.row_begin, strip.tile_rows
        if strip.queries.skipped:
            prefix = prefixes[strip.queries.group, strip.kv_head]
            tile_rows = line[prefix].tile_rows
            before = strip.queries.q_begin - line[prefix].queries.q_begin
            group_row = before * spec.group_size
        rows = parts.get(index, [])
        found.append(
            Shared(prefix, strip.kv_head, group_row, strip.row_end - strip.row_begin,
                   rows[0] if rows else -1, len(rows), tile_rows, strip.queries.q_begin)
        )  # fmt: skip
    return found


def _whole(spec: SplitSpec, line: list[Strip], total: int) -> bool:
    if not spec.whole or spec.piece or spec.groups or not line:
        return False
    return max(strip.cost for strip in line) * spec.whole * spec.num_ctas <= total


def _check(
    spec: SplitSpec, q_lens: Sequence[int], kv_lens: Sequence[int], shared: Sequence[int]
) -> None:
    for name, value, most, remedy in (
        ("requests", len(q_lens), spec.batch, "batch"),
        ("query tokens", sum(q_lens), spec.tokens, "tokens"),
        ("query tokens of one request", max(q_lens, default=0), spec.max_q_len, "max_q_len"),
        ("keys of one request", max(kv_lens, default=0), spec.max_kv_len, "max_kv_len"),
        ("groups of requests", len(shared), spec.groups, "groups"),
    ):
        if value > most:
            raise ValueError(
                f"plan: the batch has {value} {name} and the spec is made for {most}; "
                f"make one with {remedy} = {value} or more"
            )

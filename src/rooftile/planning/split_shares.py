"""Where the shares of plans of paged attention begin, and which CTA has which (split_kv.py)."""

from __future__ import annotations

from rooftile.planning.split_strips import Strip
from rooftile.types import SplitSpec

MOST_UNEVEN = 17  # sixteenths of an equal share, where groups have CTAs of their own
# Query tiles that find keys in the L2 cache which their neighbours have just read, though these lines are the first
# to leave it. Of 64 requests there are 4; with 8 and 16 keys were read from memory again.
MOST_TOGETHER = 4


class Shares:
    """Shares of a line of strips for `used` CTAs.

    alone: how many CTAs each strip of a group has to itself; 0: groups are cut like requests.
    """

    def __init__(self, spec: SplitSpec, line: list[Strip], total: int, used: int) -> None:
        costs = [strip.cost for strip in line if strip.queries.shared]
        count, of_groups = len(costs), sum(costs)
        alone = (2 * used * of_groups + total * count) // (2 * total * count) if count else 0
        ctas = alone * count
        others = used - ctas
        uneven = MOST_UNEVEN * total
        if (
            16 * used * of_groups > uneven * ctas
            or 16 * used * (total - of_groups) > uneven * others
        ):
            alone, ctas, others, of_groups = 0, 0, used, 0
        self._spec, self._line = spec, line
        self._of_requests, self._others = total - of_groups, others  # costs, CTAs
        self._of_groups, self._ctas = of_groups, ctas
        self.alone = alone

    def cuts(self) -> list[tuple[int, int]]:
        """For each share where it begins, and one more for the end: (strip, KV tiles into it)."""
        cuts = []
        strip, start = 0, 0  # the strip that holds the wanted place, and where it begins
        for share in range(self._spec.num_ctas + 1):
            place = self._place(share)
            while strip < len(self._line) and start + self._line[strip].cost <= place:
                start += self._line[strip].cost
                strip += 1
            if strip == len(self._line):
                cuts.append((strip, 0))
            else:
                cuts.append(_cut(self._spec, strip, self._line[strip], place - start))
        return cuts

    def are_whole(self, strip: Strip) -> bool:
        """Whether a group's strip takes whole shares: then its query tiles are cut in the same places."""
        return bool(self.alone) and strip.cost * self._ctas == self.alone * self._of_groups

    def of_cta(self, cta: int) -> int:
        """Its share. CTAs of groups that are neighbours have the query tiles of the same keys."""
        if not self._others <= cta < self._others + self._ctas:
            return cta
        query_tiles = self._ctas // self.alone // self._spec.num_kv_heads
        begin = (cta - self._others) // (query_tiles * self.alone) * query_tiles * self.alone
        part, query_tile = divmod(cta - self._others - begin, query_tiles)
        return self._others + begin + query_tile * self.alone + part

    def _place(self, share: int) -> int:
        """Where on the line a share begins, in clocks."""
        place = min(share, self._others) * self._of_requests // self._others
        if share > self._others and self._ctas:
            place += min(share - self._others, self._ctas) * self._of_groups // self._ctas
        return place


def _cut(spec: SplitSpec, index: int, strip: Strip, offset: int) -> tuple[int, int]:
    """The allowed place nearest to `offset` clocks into a strip."""
    tiles = strip.kv_end - strip.kv_begin
    if spec.piece or tiles < 2 * spec.min_piece:
        return (index, 0) if 2 * offset < strip.cost else (index + 1, 0)
    tile = (max(offset - spec.item_cost, 0) + strip.tile_cost // 2) // strip.tile_cost
    if tile < spec.min_piece:
        return index, 0
    return (index, tile) if tiles - tile >= spec.min_piece else (index + 1, 0)

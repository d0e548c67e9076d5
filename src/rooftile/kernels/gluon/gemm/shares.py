"""A CTA's share of the steps along K of all tiles, segment by segment.

The first `stream_tiles` tiles form one line of steps, which is cut into pieces; the tiles after
them are taken whole, in turn. A group of `group_ctas` CTAs shares `group_steps` steps of the line
evenly: Stream-K is one group, split-K a group for each tile.

    begin, end, whole = shares.first()
    while (end > begin) | (whole < shares.num_tiles):
        tile, first, last, end, whole = shares.take(begin, end, whole)
        ...steps first .. last - 1 along K of the tile...
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.divisor import Divisor, choose_divisor
from rooftile.kernels.gluon.tile.record import record


@record
class Shares:
    """Numbers that are the same in every CTA; see the module for their use."""

    num_tiles: gl.tensor
    tiles_m: gl.tensor
    band: Divisor  # rows of tiles that are walked together, for the L2 cache
    last_band: Divisor  # of the last band
    tiles_per_band: Divisor
    iterations: Divisor  # steps along K of a tile
    stream_tiles: gl.tensor
    group_ctas: Divisor
    group_steps: gl.tensor
    streamed: gl.constexpr  # there is a line
    apart: gl.constexpr  # every CTA has one segment: a part, stored by itself
    cluster: gl.constexpr  # CTAs that take every share together: what is a CTA here is a cluster
    split: gl.constexpr  # parts along K, of one tile, of a cluster's CTAs

    @gluon.jit
    def cta(self):
        return gl.program_id(0) // self.cluster

    @gluon.jit
    def bound(self, cta):
        """Where on the line the piece of a CTA begins, and the one of the CTA before ends."""
        group = self.group_ctas.divide(cta)
        steps = (cta - group * self.group_ctas.value) * self.group_steps
        return group * self.group_steps + self.group_ctas.divide(steps)

    @gluon.jit
    def first(self):
        """This CTA's piece of the line, and its first whole tile."""
        cta = self.cta()
        if self.apart:
            return self.bound(cta), self.bound(cta + 1), self.num_tiles
        if not self.streamed:
            return 0 * cta, 0 * cta, cta
        return self.bound(cta), self.bound(cta + 1), self.stream_tiles + cta

    @gluon.jit
    def take(self, begin, end, whole):
        """The next segment: tile, first step, last step (exclusive); and what is left."""
        if self.apart:
            tile = self.group_ctas.divide(self.cta())
            start = tile * self.iterations.value
            return tile, begin - start, end - start, begin, whole
        if not self.streamed:
            return (
                whole,
                0 * whole,
                self.iterations.value,
                end,
                whole + gl.num_programs(0) // self.cluster,
            )
        streamed = end > begin
        tile = gl.where(streamed, self.iterations.divide(end - 1), whole)
        start = tile * self.iterations.value
        first = gl.where(streamed, gl.maximum(begin - start, 0), 0)
        last = gl.where(streamed, end - start, self.iterations.value)
        end = gl.where(streamed, start + first, end)
        whole = gl.where(streamed, whole, whole + gl.num_programs(0) // self.cluster)
        return tile, first, last, end, whole

    @gluon.jit
    def part_of_cluster(self):
        """Where the CTAs of a cluster share a tile's steps: the tile, first and last step."""
        tile = self.cta()
        part = gl.program_id(0) % self.cluster // (self.cluster // self.split)
        first = self.iterations.value * part // self.split
        return tile, first, self.iterations.value * (part + 1) // self.split

    @gluon.jit
    def part(self):
        """Which part of its tile this CTA has, where parts are stored by themselves."""
        cta = self.cta()
        return cta - self.group_ctas.divide(cta) * self.group_ctas.value

    @gluon.jit
    def corner(self, tile):
        """Row and column of a tile, in tiles. Tiles run down a band of rows, column by column."""
        which = self.tiles_per_band.divide(tile)
        top = which * self.band.value
        height = choose_divisor(self.tiles_m - top < self.band.value, self.last_band, self.band)
        within = tile - which * self.tiles_per_band.value
        column = height.divide(within)
        return top + within - column * height.value, column

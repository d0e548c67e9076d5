"""Which tiles a CTA takes: every so many of those of all heads, tile after tile of a head."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.divisor import Divisor
from rooftile.kernels.gluon.tile.record import record


@record
class Order:
    """The tiles of a dense call; divisions are by numbers that the host knows."""

    num_tiles: gl.tensor
    q_tiles: Divisor  # of a head
    num_heads: Divisor
    rows: gl.constexpr  # of a tile

    @gluon.jit
    def tile(self, i):
        """Batch, head and first row of this CTA's tile i, and whether there is one."""
        tile = gl.program_id(0) + i * gl.num_programs(0)
        flat = self.q_tiles.divide(tile)
        m = self.q_tiles.value - 1 - (tile - flat * self.q_tiles.value)
        batch = self.num_heads.divide(flat)
        head = flat - batch * self.num_heads.value
        return batch, head, m * self.rows, tile < self.num_tiles

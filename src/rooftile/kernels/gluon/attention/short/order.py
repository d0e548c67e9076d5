"""Which tiles a CTA takes: every so many of those of all heads, tile after tile of a head."""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.divisor import Divisor
from rooftile.kernels.gluon.tile.mask import key_range
from rooftile.kernels.gluon.tile.record import record


@record
class Order:
    """The tiles of a dense call; divisions are by numbers that the host knows."""

    num_tiles: gl.tensor
    q_tiles: Divisor  # of a head
    num_heads: Divisor
    group_size: Divisor  # query heads per key-value head
    q_len: gl.tensor
    kv_len: gl.tensor
    right: gl.tensor
    rows: gl.constexpr  # of a tile
    block: gl.constexpr  # keys
    has_right: gl.constexpr

    @gluon.jit
    def tile(self, i):
        """Batch, head, first row of this CTA's tile i, and its blocks of keys (0: there is no tile i)."""
        tile = gl.program_id(0) + i * gl.num_programs(0)
        flat = self.q_tiles.divide(tile)
        m = self.q_tiles.value - 1 - (tile - flat * self.q_tiles.value)
        batch = self.num_heads.divide(flat)
        row0 = m * self.rows
        _, blocks = key_range(
            *(row0, self.rows, self.q_len, self.kv_len, -1, self.right),
            *(self.block, False, self.has_right),
        )
        blocks = gl.where(tile < self.num_tiles, blocks, 0)
        return batch, flat - batch * self.num_heads.value, row0, blocks


@record
class Ahead:
    """The block of keys that is loaded next: number n of its tile's, which are taken from the last
    to the first."""

    tile: gl.tensor  # its number within this CTA's
    batch: gl.tensor
    head: gl.tensor  # of keys
    n: gl.tensor  # below 0: there is none

    @gluon.jit
    def following(self, order):
        tile = self.tile
        batch = self.batch
        head = self.head
        n = self.n - 1
        if n == -1:
            tile += 1
            batch, q_head, _, blocks = order.tile(tile)
            head = order.group_size.divide(q_head)
            n = blocks - 1
        return Ahead(tile, batch, head, n)


@gluon.jit
def first_block(order):
    """The last block of keys of this CTA's first tile."""
    return Ahead(gl.to_tensor(-1), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)).following(
        order
    )

"""What plans of a matrix product take at least, so that most need not be priced.

bound = bound_of(product, tiling, machine)
if bound.seconds <= enough:                 # of all plans with these tiles
    for plan in candidates(product, machine.units, [tiling]):
        if bound.of(plan) <= enough:        # of one
            seconds = predict(plan, machine)
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.planning.hardware import Machine
from rooftile.planning.stream_k import Decomposition, Product, Tiling
from rooftile.planning.stream_k_cost import RING_BYTES, clusters, is_apart, multiplying
from rooftile.planning.stream_k_prices import Prices, machinery


@dataclass(frozen=True)
class Bound:
    """What plans with some tiles take at least, which is known sooner than what they are predicted to."""

    product: Product
    tiling: Tiling
    prices: Prices
    step: float  # seconds of one, as far as they depend on the tile only
    reading: float  # seconds, all that is read and stored
    operands: float  # bytes
    turns: int  # of whole tiles
    evenly: float  # steps of each multiprocessor, if all have the same

    @property
    def seconds(self) -> float:
        """Of all plans: whole tiles in turn, or all multiprocessors busy until the end and parts to add."""
        tiling, prices = self.tiling, self.prices
        whole = self.turns * -(-tiling.iterations(self.product) // tiling.split) * self.step
        if tiling.split == 1:
            adding = min(prices.apart, prices.published)
            whole = min(whole, self.evenly * self.step + adding)
        return self._beside(whole)

    def of(self, plan: Decomposition) -> float:
        """Of one plan."""
        prices, most = self.prices, plan.most
        found = self._beside(most.steps / self.tiling.split * self.step)
        rings = plan.num_ctas * self.tiling.ctas * RING_BYTES
        found += min(self.operands, rings) / prices.first_bandwidth
        if is_apart(plan):
            bytes_of_part = 4.0 * self.product.m * self.product.n
            return found + prices.apart + plan.group_ctas * bytes_of_part / prices.part_bandwidth
        return found + prices.published if most.parts > 1 else found

    def _beside(self, stepping: float) -> float:
        """With a launch, and what is read at the same time."""
        s = self.prices.sharpness
        return self.prices.launch + (stepping**s + self.reading**s) ** (1 / s)


def bound_of(product: Product, tiling: Tiling, machine: Machine, itemsize: int = 2) -> Bound:
    known = machinery(machine)
    prices, tiles = known.prices, tiling.tiles(product)
    units = clusters(machine.units, tiling.ctas)
    received = prices.received * (tiling.cta_m + tiling.cta_n)
    clocks = max(multiplying(tiling, machine, itemsize), received)
    m, n, k = product.m, product.n, product.k
    return Bound(
        product,
        tiling,
        prices,
        known.pace_of(tiling) * clocks / prices.clock,
        ((m + n) * k + m * n) * itemsize / max(prices.bandwidth, prices.passing_bandwidth),
        float((m + n) * k * itemsize),
        -(-tiles // units),
        tiles * tiling.iterations(product) / units,
    )

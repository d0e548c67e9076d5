"""Which of the kernels runs a product, and how: the one that is predicted to take least."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from rooftile.kernels.gluon.gemm.few_plan import (
    FewRowsPlan,
    PortablePlan,
    plan_of_few_rows,
    plan_of_portable,
)
from rooftile.kernels.gluon.gemm.plan import Plan, choose_plan
from rooftile.kernels.gluon.gemm.tile_plan import TilePlan
from rooftile.planning.hardware import H200
from rooftile.planning.stream_k import Product
from rooftile.planning.tile_cost import predict_copies, predict_tiles, stages_of, suits_tiles

TILES = ((64, 16), (64, 32), (64, 64), (128, 64))
# Predictions are of a product alone. One after another, as in an engine, few rows take half as long by the
# kernel that is for them: its weights are loaded under the end of the product before.
LATER = 1.12


@dataclass(frozen=True)
class Operands:
    """What a choice depends on besides the sizes.

    plain: both have k as their contiguous dimension and 2-byte elements, and neither scales nor a
        gate follow.
    unit: elements of a row that can be loaded at a time.
    copied: bytes that the copy engine cannot address where they lie.
    rows: bytes that rows of a and of b (of copies, where there are any) are multiples of, a line of
        the cache at most.
    gated: a gate follows, but for which it would be plain.
    bare: it is plain, nothing but a bias follows, and the result has the operands' type.
    """

    itemsize: int
    plain: bool
    unit: int
    copied: int
    rows: tuple[int, int]
    gated: bool = False
    bare: bool = False


AnyPlan = Plan | TilePlan | FewRowsPlan | PortablePlan


@lru_cache(maxsize=4096)
def choose(
    m: int, n: int, k: int, operands: Operands, num_sms: int, batch_invariant: bool
) -> tuple[AnyPlan, float]:
    """A plan and the seconds that it is predicted to take, copies included."""
    stream = choose_plan(
        *(m, n, k, operands.itemsize, num_sms, batch_invariant, operands.rows, operands.plain),
        operands.bare and n * operands.itemsize % 16 == 0,
        operands.copied > 0,
    )
    best: AnyPlan = stream
    seconds = stream.seconds + predict_copies(operands.copied, H200)
    if batch_invariant or not (operands.plain or operands.gated):
        return best, seconds
    if operands.unit == 8:
        others: list[AnyPlan | None] = []
        if n % (16 if operands.gated else 8) == 0:
            others.append(plan_of_few_rows(m, n, k, num_sms, operands.gated))
        if operands.bare:
            others.append(plan_of_portable(m, n, k))
        for other in others:
            likely = LATER if isinstance(other, FewRowsPlan) else 1.0
            if other is not None and other.seconds < likely * seconds:
                best, seconds = other, other.seconds
    if operands.gated:
        return best, seconds
    if suits_tiles(Product(m, n, k), operands.unit, num_sms):
        machine = replace(H200, units=num_sms)
        for block_m, block_n in TILES:
            predicted = predict_tiles(Product(m, n, k), block_m, block_n, operands.unit, machine)
            if predicted is not None and predicted < seconds:
                stages = stages_of(Product(m, n, k), block_m, block_n, operands.unit, num_sms)
                best, seconds = TilePlan(block_m, block_n, predicted, stages=stages), predicted
    return best, seconds

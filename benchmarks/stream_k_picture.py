"""Draws docs/images/stream_k.png: nine tiles on four SMs, the example of the Stream-K paper (figures 1, 2).

python benchmarks/stream_k_picture.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from rooftile.bench.ops.gemm_plot import draw
from rooftile.planning.stream_k import Decomposition, Product, Tiling, data_parallel, stream_k
from rooftile.planning.stream_k_cost import Costs
from rooftile.planning.stream_k_timeline import timeline

SMS = 4
PRODUCT = Product(384, 384, 128)
WHOLE, HALF = Tiling(128, 128, 4), Tiling(128, 64, 4)


def main(file: Path) -> None:
    """A step takes as long as its multiplications, and everything else no time."""

    def panel(name: str, plan: Decomposition, step: float) -> tuple[str, list]:
        spans = timeline(plan, Costs(setup=0.0, iteration=step, publish=0.0, fixup=0.0))
        return f"{name}: {plan.efficiency(SMS):.0%} of the SMs' time is used", spans

    panels = [
        panel("9 tiles of 128x128, whole", data_parallel(PRODUCT, WHOLE, SMS), 1e-6),
        panel("18 tiles of 128x64, whole", data_parallel(PRODUCT, HALF, SMS), 0.5e-6),
        panel("9 tiles of 128x128, Stream-K", stream_k(PRODUCT, WHOLE, SMS), 1e-6),
    ]
    draw(panels, SMS, f"{PRODUCT} on {SMS} SMs, a colour for each tile", file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

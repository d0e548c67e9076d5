"""Stream-K matrix products for Hopper (Osama et al. 2023, arXiv 2301.03598).

Persistent CTAs, one for each SM, walk equal shares of all steps along K (planning/stream_k.py is the
specification). One producer warp copies tiles of both operands by TMA; two consumer warpgroups
multiply. A CTA walks its share from its last tile to its first, so the part of a tile that another
CTA finishes is published first thing, and a finisher waits for CTAs of lower numbers only.

| file | what it is |
| --- | --- |
| forward.py | from the operator's arguments to a launch |
| plan.py, config.py | who computes what with which tiles; their stages and registers |
| kernel.py | shared memory, barriers, roles |
| problem.py | what every role knows |
| shares.py | a CTA's share of the steps, segment by segment |
| producer.py, consumer.py | the two roles |
| turns.py | tiles of 64 rows whose steps the warpgroups take in turn |
| cluster_sum.py | a tile whose steps the CTAs of a cluster share |
| fixup.py | parts of tiles that go from one CTA to another |
| epilogue.py | bias, activation, gate, residual, store |
| pad.py | copies of matrices that the copy engine cannot address |
| sums.py | the sum of parts that one launch stored, by another |
| choice.py | which kernel runs a product: this one, or one of those for few rows and small products |
| few_rows.py, few_plan.py, few_forward.py | 5 to 64 rows: rings that fill under the kernel before |
| direct.py, direct_plan.py, direct_forward.py | int4 weights, from memory to registers |
| codes.py | int4 weights, dequantised in registers |
| codes_digits.py | one row and int4 weights, multiplied in whole numbers |
| codes_ring.py, codes_plan.py, codes_forward.py | one row and int4 weights, in a ring |
| tile_plan.py | whole tiles whose loads the compiler pipelines (kernels/triton/gemm_tiles.py) |
"""

from rooftile.kernels import Kernel
from rooftile.kernels.gluon.gemm.forward import efficiency, matmul, supports

KERNELS = {"matmul": Kernel(matmul, supports, efficiency)}

"""The tile layer: a small vocabulary in which a Hopper kernel reads as its algorithm.

| word | file | what it is |
| --- | --- | --- |
| `Ring` | ring.py | stages of shared memory that TMA fills and consumers empty, in order |
| `take_turn`, `pass_turn` | barrier.py | ping-pong: warpgroups that use a unit one after another |
| `specialize`, `warpgroup` | roles.py | consumers that share one copy of their code, and single warps beside them |
| `any_of`, `add_once` | said.py | what a warpgroup's warps tell each other |
| `coordinates`, `describe` | rows.py | tiles of dense or ragged rows that the hardware clips |
| `multiply`, layouts | mma.py | asynchronous warpgroup products and the layouts they need |
| `multiply_used`, `add_output` | halves.py | products over half or three quarters of a tile's columns |
| `OnlineSoftmax` | softmax.py | running or anchored row maximum, sum, lazy rescaling, software exp2 |
| `visible`, `hide`, `key_range`, `whole_range` | mask.py | causal and windowed visibility, and the keys a tile has to visit |
| `store_held`, `add_held` | held.py | accumulators in global memory, for other warpgroups |
| `describe_matrix` | matrix.py | tiles of a matrix |
| `let_dependents_start`, `await_kernels_before` | dependent.py | a kernel under the end of another |
| `prefetch_maps` | maps.py | tensor maps fetched before they are needed |
| `first_to_leave` | policy.py | copies whose lines leave the L2 cache before others |
| `opaque` | opaque.py | a number that the compiler does not see through |
| `load_compute_finish` | template.py | the loops of a persistent kernel around your tiles |
| `TileQueue` | schedule.py | which tile a persistent CTA takes next, told by its producer |

The modules define device code and run in three ways: compiled by Triton for sm_90a, compiled ahead
of time on a machine without a GPU, and executed by the simulator of tests/support on a CPU. They
do not use `from __future__ import annotations`, since Triton reads the annotations of aggregates.
Integer division and remainder follow C on the GPU, so operands are kept non-negative.
"""

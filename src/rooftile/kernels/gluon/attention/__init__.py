"""Attention forward for Hopper: dense and ragged, in the schedule of FlashAttention-3 and -4.

One producer warp copies tiles of Q, K and V by TMA; two or three consumer warpgroups of 64 query
rows each multiply and take the softmax. Within a warpgroup the exponentials of block i run while
the product of block i - 1 with V is in flight; between warpgroups, turns at the matrix unit keep
one busy with products while another is busy with exponentials (ping-pong). CTAs are persistent:
the producer runs ahead into the next tile while the consumers finish the last.

Tiles are taken longest first where causality makes them unequal, and in the ragged case sequences
are ordered by a small kernel on the device, so nothing waits for the host.

| file | what it is |
| --- | --- |
| forward.py | from an operator's arguments to a launch |
| dense.py, ragged.py, call.py | what is worked out once for a kind of dense, of ragged, of both calls |
| config.py | tile sizes and switches for each head dim and length |
| kernel.py | shared memory, barriers, roles |
| problem.py | what every role knows; which tile is which |
| first_tile.py | a dense CTA's first tile, loaded before there are roles |
| producer.py, consumer.py | the two roles |
| scores.py | from products to scores: soft cap, ALiBi, functions of the caller, what is hidden |
| again.py | a tile once more where an anchored maximum did not hold |
| mods.py | functions of the caller, on the host |
| cut.py, shares.py | tiles cut along their keys where there are few: on the host, on the device |
| sequences.py | which sequence of a ragged batch a tile belongs to |
| tile_list.py | the order of a ragged batch's tiles |
"""

from rooftile.kernels import Kernel
from rooftile.kernels.gluon.attention.config import CONFIGS, SHORT_64, Config
from rooftile.kernels.gluon.attention.forward import (
    attention,
    attention_varlen,
    bind_attention,
    bind_attention_varlen,
    supports,
)

__all__ = ["CONFIGS", "KERNELS", "SHORT_64", "Config", "attention", "attention_varlen"]

KERNELS = {
    "attention": Kernel(attention, supports, efficiency=0.75, bind=bind_attention),
    "attention_varlen": Kernel(
        attention_varlen, supports, efficiency=0.75, bind=bind_attention_varlen
    ),
}

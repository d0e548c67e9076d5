"""Differential attention for Hopper: a warpgroup for each softmax of a pair, one stream of values.

Dense and ragged, one launch: the first consumer warpgroup keeps the softmax of q1 and k1, the second that
of q2 and k2, both over the same 64 query rows and the same tiles of values; at the end of a tile the
second hands its output over in shared memory and the first writes the difference. The schedule within a
warpgroup is plain attention's (gluon/attention).

Over pages, where memory binds, it is one launch of the paged kernel whose keys are both keys of a slot:
a query [q1, 0] meets [k1, k2] as q1 meets k1.

| file | what it is |
| --- | --- |
| forward.py | from an operator's arguments to a launch |
| config.py | tile sizes |
| kernel.py | shared memory, barriers, roles |
| roles.py | what the warps do |
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.kernels.gluon import paged
from rooftile.kernels.gluon.differential.forward import (
    differential_attention,
    differential_attention_varlen,
    supports,
)
from rooftile.kernels.torch.differential import Outputs, over_pages


def subtract(out: Tensor, lse: Tensor, lam: Tensor) -> Outputs:
    from rooftile.kernels.triton.differential import subtract  # which only a GPU can run

    return subtract(out, lse, lam)


def stack(q1: Tensor, q2: Tensor, shared_keys: bool) -> Tensor:
    from rooftile.kernels.triton.differential import stack_queries

    return stack_queries(q1, q2, shared_keys)


def paged_supports(call: Any) -> str | None:
    keys = call.k_dim if call.shared_keys else 2 * call.k_dim
    return paged.supports(SimpleNamespace(**{**vars(call), "k_dim": keys, "kv_dtype": None}))


KERNELS = {
    "differential_attention": Kernel(differential_attention, supports, efficiency=0.7),
    "differential_attention_varlen": Kernel(
        differential_attention_varlen, supports, efficiency=0.7
    ),
    "paged_differential_attention": Kernel(
        over_pages(paged.paged_attention, subtract, stack), paged_supports, efficiency=0.8
    ),
}

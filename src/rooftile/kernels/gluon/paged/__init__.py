"""Paged attention for Hopper: prefill, decode and mixtures, by the plan of planning/split_kv.py.

Persistent CTAs walk their runs of the plan's items, or draw whole strips where a plan cuts none. One
producer warp reads the items, looks 32 pages up at a time and copies them by TMA, running ahead across
items as far as shared memory goes; in a prefill a second one copies the values. One or two consumer
warpgroups attend with 64 packed rows each in the schedule of the dense kernel, or with at most 32 as
the columns of their products. Where a plan cuts a strip, normalised parts go to float32 buffers, and
the CTA whose part arrives last joins them in order.

| file | what it is |
| --- | --- |
| forward.py | from an operator's arguments to launches; how a call is split |
| config.py | tile sizes for each head dim |
| kernel.py | shared memory, barriers, roles |
| work.py | what every role knows; the plan's words and the consumers' messages |
| producer.py | the role that loads |
| consumer.py, few.py | the roles that attend: 64 rows a warpgroup, few rows |
| rows.py, join.py | where results go, and how parts become one |
"""

from rooftile.kernels import Kernel
from rooftile.kernels.gluon.paged.forward import bind, paged_attention, split, supports

KERNELS = {
    "paged_attention": Kernel(paged_attention, supports, efficiency=0.9, split=split, bind=bind)
}

"""Dual chunk attention for Hopper in one launch: plain attention that changes its queries at borders.

Keys do not depend on how many chunks lie between them and a query, so one online softmax goes over all
of them, last keys first, while the queries' rotation changes twice. A tile of queries lies in one chunk.
The schedules are those of plain attention, dense (gluon/attention) and over pages (gluon/paged).

| file | what it is |
| --- | --- |
| forward.py | from the dense operator's arguments to a launch |
| kernel.py | shared memory, barriers, roles |
| problem.py | what every role knows; which tile is which |
| roles.py | what the warps do |
| again.py | a second pass over tiles whose weights grow too large |
| paged.py | over pages, by the paged kernel |
"""

from rooftile.kernels import Kernel
from rooftile.kernels.gluon.dual_chunk.forward import dual_chunk_attention, supports
from rooftile.kernels.gluon.dual_chunk.paged import paged_dual_chunk_attention, paged_supports

KERNELS = {
    "dual_chunk_attention": Kernel(dual_chunk_attention, supports, efficiency=0.7),
    "paged_dual_chunk_attention": Kernel(
        paged_dual_chunk_attention, paged_supports, efficiency=0.8
    ),
}

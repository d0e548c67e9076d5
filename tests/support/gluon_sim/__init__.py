"""A simulator that runs a Gluon kernel's own source on a CPU.

    with_gpu_free_source = load_simulated("rooftile.kernels.gluon.attention")
    with simulation(seed=7, residency=2):
        out, lse = with_gpu_free_source.attention(q, k, v, None, -1, 0, 0.0, 0.1)

The kernel's modules are imported a second time against stand-ins for Triton and Gluon in which
every jitted function is plain Python and every register tile a torch tensor. So the whole path
runs: the host's descriptors and launch, and the device code. What is modelled:

- several CTAs at once with bounded residency, every warp-specialised role a task of its own;
- a seeded, adversarial scheduler: it may starve a role, stick to one, or hold back the copy engine;
- mbarriers with arrival counts, transaction bytes and phase parity, and named barriers;
- TMA loads that complete late and out of order, their destination NaN until then;
- TMA stores that read their source late, up to the wait that covers them;
- ring stages that turn to NaN when they are released;
- generic writes to shared memory that the copy engine and wgmma may not read before
  `fence_async_shared`;
- asynchronous wgmma, evaluated at its issue or as late as its wait;
- loads, stores, atomics and copies held to the tensor that they are made through, every lane that a mask
  lets through, and reads of memory that host code allocated and nobody wrote;
- deadlocks, reported with what every role waits for and where.

What is not, and stays the GPU's to check: register layouts and their conversions, swizzles, bank
conflicts, memory visibility beyond the proxy fence, register budgets, instruction scheduling, and
the text of inline assembly beyond the few sequences it recognises.
"""

from tests.support.gluon_sim.errors import Deadlock, SimulationError
from tests.support.gluon_sim.loader import load_simulated
from tests.support.gluon_sim.machine import simulation

__all__ = ["Deadlock", "SimulationError", "load_simulated", "simulation"]

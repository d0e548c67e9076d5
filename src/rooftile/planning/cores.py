"""One core of a machine as a kernel's pipeline sees it: its units, and the paths between them."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.planning.hardware import ASCEND_910B, B200, EPYC_2_CORES, H100, H200, Machine

KIB = 1024


@dataclass(frozen=True)
class Core:
    """Rates are of one core (an SM, a CPU core, a cube core with its vector cores), a clock.

    lanes: 32-bit vector operations. read, write: bytes between the core and the L2 cache (on a
    CPU: its own cache and the next). tile_bytes: memory for K, V and Q tiles; accumulator_bytes:
    for scores and outputs. overlap: whether its units work at the same time.
    split: where matrix and vector cores meet only through L2, the vector side's paths, else None.
    """

    machine: Machine
    lanes: float
    read: float
    write: float
    tile_bytes: int
    accumulator_bytes: int
    overlap: bool = True
    split: Split | None = None
    how: str = ""  # what overlaps with what, in words


@dataclass(frozen=True)
class Split:
    """Bytes a clock that all vector cores of one matrix core read from and write to L2."""

    read: float
    write: float
    bytes: int  # memory of the vector cores together


_HOPPER_HOW = (
    "a warpgroup takes the softmax of a block while its product of the block before with V is in "
    "flight; warpgroups take turns at the matrix unit; copies run ahead by the ring's stages"
)
# L2 reads: 5120 bytes a clock for the whole chip (A100 white paper, page 33; none is given for
# later chips, on which it is not lower), shared by the SMs; stores at half of it. 128 lanes: 4
# schedulers of 32 threads. 227 KiB of shared memory; registers 256 KiB, of which accumulators can
# take three quarters.
CORES = {
    "h100": Core(H100, 128, 5120 / 132, 2560 / 132, 227 * KIB, 192 * KIB, how=_HOPPER_HOW),
    "h200": Core(H200, 128, 5120 / 132, 2560 / 132, 227 * KIB, 192 * KIB, how=_HOPPER_HOW),
    # Accumulators have 256 KiB of tensor memory. L2 rate for one SM taken as Hopper's.
    "b200": Core(
        B200,
        128,
        5120 / 132,
        2560 / 132,
        227 * KIB,
        256 * KIB,
        how="two tiles of 128 rows alternate: one is multiplied while the other, in tensor memory, "
        "is exponentiated (FlashAttention-4)",
    ),
    # CANN's platform file Ascend910B2C.ini, [AICoreSpec] and [AICoreMemoryRates]: cube reads L2 at
    # 110 and writes at 86 bytes a clock; two vector cores for a cube core, each reads at 110 and
    # writes at 64 (ub_to_l2_rate), and works on 256 bytes (64 lanes) a clock; L1 512 KiB, L0C 128
    # KiB, unified buffer 192 KiB for each vector core.
    "ascend-910b": Core(
        ASCEND_910B,
        128,
        110,
        86,
        512 * KIB,
        128 * KIB,
        split=Split(read=220, write=128, bytes=2 * 192 * KIB),
        how="the cube core multiplies one block while the two vector cores take the softmax of "
        "another; scores, weights and partial outputs pass between them through L2",
    ),
    # Zen 4: 16 float32 lanes a clock, 64 bytes a clock from L2, 32 back (AMD's guide, 57647); tiles
    # in half of 1 MiB of L2, scores and outputs in L1 and half of L2.
    "cpu": Core(
        EPYC_2_CORES,
        16,
        64,
        32,
        512 * KIB,
        512 * KIB,
        overlap=False,
        how="products and exponentials are instructions of one stream on the same vector units; only "
        "loads run ahead of them",
    ),
}


GPUS = ("h200", "h100", "b200")  # whose units share a call by our plans


def gpu_of(name: str, what: str) -> Machine:
    """Raises ValueError for a machine that is not described, or no GPU, on which nothing plans `what`."""
    machine = core_of(name).machine
    if name not in GPUS:
        raise ValueError(
            f"{what} is planned for the multiprocessors of a GPU, and {name!r} is none; choose from "
            f"{', '.join(GPUS)}"
        )
    return machine


def core_of(name: str) -> Core:
    """Raises ValueError for a machine that is not described."""
    if name not in CORES:
        raise ValueError(f"there is no machine {name!r}; choose from {', '.join(CORES)}")
    return CORES[name]

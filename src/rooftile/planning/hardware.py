"""Machines as the roofline sees them: what they can compute, exponentiate and read per second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """units: streaming multiprocessors or cores. Rates per clock are of one unit, dense bfloat16.

    bandwidth: bytes per second of device memory.
    """

    name: str
    units: int
    clock: float  # Hz
    matrix_flops_per_clock: float
    exps_per_clock: float
    bandwidth: float

    @property
    def matrix_flops(self) -> float:
        return self.units * self.clock * self.matrix_flops_per_clock

    @property
    def int8_flops(self) -> float:
        """On 8-bit integers: twice those on bfloat16, in matrix units and in AVX-512 alike."""
        return 2 * self.matrix_flops

    @property
    def exps(self) -> float:
        return self.units * self.clock * self.exps_per_clock


# GPUs: NVIDIA's data sheets (SXM, dense, boost clock) give rate and bandwidth; 16 exponentials a
# clock and SM for both generations, 4096 and 8192 bf16 operations: FlashAttention-4, section 2.
H100 = Machine("H100 SXM", 132, 1.83e9, 4096, 16, 3.35e12)
H200 = Machine("H200 SXM", 132, 1.83e9, 4096, 16, 4.8e12)
B200 = Machine("B200 SXM", 148, 1.85e9, 8192, 16, 8.0e12)
# Ascend 910B2: 24 cube cores of 16 x 16 x 16 multiply-adds a clock at 1.8 GHz, each with two vector
# cores of 64 lanes, of which an exponential is taken to be one operation (none is published); 1.6
# TB/s of HBM2e. The first three from CANN's platform file Ascend910B2C.ini.
ASCEND_910B = Machine("Ascend 910B2", 24, 1.8e9, 8192, 128, 1.6e12)
# Two cores of a Zen 4 EPYC. One 512-bit vdpbf16ps a clock (AMD's optimisation guide, 57647) is 16
# lanes of 2 multiply-adds; a polynomial exponential is about 10 instructions of 16 lanes; 3.7 GHz
# is the boost clock, 70 GB/s the best read over huge pages that was measured.
EPYC_2_CORES = Machine("AMD EPYC, 2 cores", 2, 3.7e9, 64, 1.6, 70e9)

# Keyed by `rooftile.bench.host.Host.slug`, the name of the directory that results go to.
MACHINES = {
    "nvidia-h100-80gb-hbm3": H100,
    "nvidia-h200": H200,
    "nvidia-b200": B200,
    "amd-epyc-2-cores": EPYC_2_CORES,
}

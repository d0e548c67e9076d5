"""Reading memory as fast as it goes: what memory-bound kernels are compared with in the same run."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words of 4 bytes a program takes at a time


@triton.jit
def _read_kernel(words, sums, count, block: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([block], tl.int32)
    for start in range(program * block, count, tl.num_programs(0) * block):
        at = start + tl.arange(0, block)
        total += tl.load(words + at, mask=at < count, other=0)
    tl.store(sums + program, tl.sum(total, 0))


def streaming_read(nbytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """A call that reads `nbytes` of device memory once, from first to last, and sums it up."""
    words = torch.randint(-(2**31), 2**31, (nbytes // 4,), dtype=torch.int32, device=device)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    programs = units * 8
    sums = torch.empty(programs, dtype=torch.int32, device=device)

    def read() -> torch.Tensor:
        _read_kernel[(programs,)](words, sums, words.numel(), block=BLOCK, num_warps=8)
        return sums

    return read

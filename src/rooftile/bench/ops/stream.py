"""Reading memory as fast as it goes: what memory-bound kernels are compared with in the same run."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from rooftile.bench.ops.timing import time_in_turn

READ_BYTES = 4 << 30
BLOCK = 4096  # words of 4 bytes a program takes at a time
BLOCKS = 8  # of a program: few, so that SMs which are faster read more (H200: 3% over equal parts)


@triton.jit
def _read_kernel(words, sums, count, block: tl.constexpr, blocks: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([block], tl.int32)
    for i in range(blocks):
        at = (program * blocks + i) * block + tl.arange(0, block)
        total += tl.load(words + at, mask=at < count, other=0)
    tl.store(sums + program, tl.sum(total, 0))


def streaming_read(nbytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """A call that reads `nbytes` of device memory once, from first to last, and sums it up."""
    words = torch.randint(-(2**31), 2**31, (nbytes // 4,), dtype=torch.int32, device=device)
    programs = triton.cdiv(words.numel(), BLOCK * BLOCKS)
    sums = torch.empty(programs, dtype=torch.int32, device=device)

    def read() -> torch.Tensor:
        _read_kernel[(programs,)](
            words, sums, words.numel(), block=BLOCK, blocks=BLOCKS, num_warps=8
        )
        return sums

    return read


def bandwidth(device: torch.device) -> float:
    """Bytes a second that reading 4 GiB reaches."""
    timing = time_in_turn({"read": streaming_read(READ_BYTES, device)}, device)["read"]
    return READ_BYTES / timing.us * 1e6

"""Grids of any size: a GPU counts 2^31 - 1 programs along the first axis, but 65,535 along others."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

LONGEST = 65535  # of the second axis and of the third


def grid_of(first: int, second: int) -> tuple[int, int, int]:
    """A grid of first x second programs, whose place along the second `second_id` tells.

    Where the second is too long, the third counts rounds of it, and the last few programs may stand
    beyond its end.
    """
    rounds = triton.cdiv(second, LONGEST)
    return first, triton.cdiv(second, max(rounds, 1)), rounds


@triton.jit
def second_id():
    return tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)


@triton.jit
def pair_id(num_heads, sequences):
    """The head and sequence of a program, heads first. Programs beyond the last pair do its work
    again: they write what it writes.
    """
    pair = tl.minimum(second_id(), num_heads * sequences - 1)
    return pair % num_heads, pair // num_heads

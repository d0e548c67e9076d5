"""Division by numbers that the host knows, in three instructions instead of some forty in a row.

    # host                                    # device
    numbers = divisor_fields(d)               d = Divisor(value, factor, shift)
                                              quotient = d.divide(x)

Granlund and Montgomery 1994, "Division by invariant integers using multiplication": with s bits in
d - 1, x // d = x (2^(30 + s) // d + 1) >> (30 + s) for 0 <= x < 2^30.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.record import record


def divisor_fields(divisor: int) -> tuple[int, int, int]:
    """The fields of a `Divisor` from 1 to 2^29, each below 2^31."""
    shift = 30 + (divisor - 1).bit_length()
    return divisor, 2**shift // divisor + 1, shift


@record
class Divisor:
    """A number that many others are divided by; see the module for its use."""

    value: gl.tensor
    factor: gl.tensor
    shift: gl.tensor

    @gluon.jit
    def divide(self, x):
        """x // value for 0 <= x < 2^30 (any number for x < 0)."""
        product = gl.cast(x, gl.int64) * self.factor
        return gl.cast(product >> self.shift, gl.int32)


@gluon.jit
def choose_divisor(condition, a, b):
    """a where the condition holds, else b."""
    return Divisor(
        gl.where(condition, a.value, b.value),
        gl.where(condition, a.factor, b.factor),
        gl.where(condition, a.shift, b.shift),
    )


@gluon.jit
def divide_few(x, d):
    """x // d for 0 <= x < 2^20 and d >= 1 that nobody has prepared: by float32, in a third of the time
    that the compiler's division by an unknown number takes. (x + 1/2) / d is 1 / 2d or more from every
    integer, and wrong by less: 3 roundings of 2^-24.
    """
    return gl.cast((gl.cast(x, gl.float32) + 0.5) / gl.cast(d, gl.float32), gl.int32)

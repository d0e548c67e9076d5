"""Online softmax (Milakov and Gimelshein 2018) in log2 units, as FlashAttention-4 refines it.

    softmax = start_softmax(64, gl.SliceLayout(1, S))
    for i in range(n):
        p, alpha, softmax = softmax.step(scores(i), factor, lazy=True, software_share=1)
        o = rescale(o, alpha, 64, lazy=True)  # o was summed under the maximum before this step
        o = o + p @ v(i)
    out = o * softmax.reciprocal()

Or, anchored: the maximum follows only where it is asked to, and sums above `OVERFLOW` at the end (NaN
too) say that a row must be computed again.

        if i == 0:
            alpha, softmax = softmax.anchor(scores(i), factor)
            o = rescale(o, alpha, 64, lazy=False)
        p, softmax = softmax.weigh(scores(i), factor, software_share=0)

`factor` turns raw scores into log2 units (softmax_scale * log2 e). The maximum starts at -1e30
rather than -inf, so that rows which see nothing give p = 0 and alpha = 1 without a NaN. A sink is
the start m = sink, l = 1.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooftile.kernels.gluon.tile.opaque import moved
from rooftile.kernels.gluon.tile.record import record

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NO_MAXIMUM = gl.constexpr(-1.0e30)
# Lazy rescaling: the maximum in use may lag behind by a factor of 2^8, which float32 sums and
# 16-bit weights bear without loss.
LAG = gl.constexpr(8.0)

# Sums above it, under a maximum that lags behind without limit (`OnlineSoftmax.weigh`), are not
# trusted: weights end at 2^127, and their products with values must stay below it too.
OVERFLOW = gl.constexpr(2.0**64)

# 2^f for f in [-1/2, 1/2], relative error 1.0e-4 (a twentieth of a bfloat16 rounding); the constant
# term is exactly 1, so that whole powers of two are exact.
_C1 = gl.constexpr(0.69328293)
_C2 = gl.constexpr(0.24221096)
_C3 = gl.constexpr(0.05500893)
# Adding 1.5 * 2^23 rounds a float32 to an integer, kept in its low bits.
_ROUND = gl.constexpr(12582912.0)


@gluon.jit
def exp2_on_fma_units(x):
    """2^x for x <= 127 by Cody and Waite's reduction and a cubic; 0 for x <= -127, and for NaN."""
    x = gl.maximum(x, -127.0)
    shifted = x + _ROUND
    f = x - (shifted - _ROUND)
    p = ((_C3 * f + _C2) * f + _C1) * f + 1.0
    bits = p.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _one_of_four(a, b, c, d):
    return gl.exp2(a), gl.exp2(b), gl.exp2(c), exp2_on_fma_units(d)


@gluon.jit
def _two_of_four(a, b, c, d):
    return gl.exp2(a), exp2_on_fma_units(b), gl.exp2(c), exp2_on_fma_units(d)


@gluon.jit
def exp2(x, software_share: gl.constexpr):
    """2^x, `software_share` quarters (0, 1 or 2) of the elements on the FMA units.

    The special-function units deliver 16 a clock and SM; where that binds (head dim 64), a share
    of elements goes where there is room.
    """
    if software_share == 0:
        return gl.exp2(x)
    elif software_share == 1:
        return gl.map_elementwise(_one_of_four, x, pack=4)[0]
    else:
        return gl.map_elementwise(_two_of_four, x, pack=4)[0]


@record
class OnlineSoftmax:
    """Running state per row: maximum in use (log2 units) and the sum of weights under it."""

    maximum: gl.tensor  # [rows] float32
    total: gl.tensor  # [rows] float32, or [rows, 8], see in_parts

    @gluon.jit
    def step(self, s, factor, lazy: gl.constexpr, software_share: gl.constexpr):
        """Takes scores s [rows, columns]; returns weights p, the rescaling alpha, the new state.

        Earlier sums are to be multiplied by alpha [rows]. With `lazy`, the maximum follows only
        where it would grow by more than 2^8, and alpha is exactly 1 elsewhere.
        """
        highest = gl.max(s, 1) * factor
        if lazy:
            maximum = gl.where(highest > self.maximum + LAG, highest, self.maximum)
        else:
            maximum = gl.maximum(highest, self.maximum)
        p = exp2(s * factor - gl.expand_dims(maximum, 1), software_share)
        alpha = gl.exp2(self.maximum - maximum)
        return p, alpha, OnlineSoftmax(maximum, add(scaled(self.total, alpha), p))

    @gluon.jit
    def anchor(self, s, factor):
        """The rescaling alpha, and the state whose maximum covers scores s, which are still to be
        weighed: see `weigh`."""
        maximum = gl.maximum(gl.max(s, 1) * factor, self.maximum)
        alpha = gl.exp2(self.maximum - maximum)
        return alpha, OnlineSoftmax(moved(maximum, alpha), scaled(self.total, alpha))

    @gluon.jit
    def weigh(self, s, factor, software_share: gl.constexpr):
        """Weights p under the maximum as it is, which scores may exceed, and the new state.

        Float32 and bfloat16 bear weights up to 2^127, so as long as sums stay below `OVERFLOW`
        nothing is lost; a row whose sum does not must be computed again.
        """
        p = exp2(s * factor - gl.expand_dims(self.maximum, 1), software_share)
        return p, OnlineSoftmax(self.maximum, add(self.total, p))

    @gluon.jit
    def joined(self, layout: gl.constexpr):
        """The same state with one sum a row, for the end; `layout` is that of the maximum."""
        if len(self.total.shape) == 2:
            return OnlineSoftmax(self.maximum, gl.convert_layout(gl.sum(self.total, 1), layout))
        else:
            return self

    @gluon.jit
    def reciprocal(self):
        """1 / sum of weights, and 1 where a row saw nothing."""
        return 1.0 / gl.where(self.total != 0.0, self.total, 1.0)

    @gluon.jit
    def lse(self, fast: gl.constexpr = False):
        """Natural logarithm of the sum of exponentials; -inf where a row saw nothing.

        fast: by the hardware's logarithm, right to 2^-22, in 2 instructions instead of 25.
        """
        log = _fast_log2(self.total) if fast else gl.log2(self.total)
        lse = (self.maximum + log) * LN_2
        return gl.where(self.total != 0.0, lse, float("-inf"))


@gluon.jit
def _fast_log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def overflowed(total):
    """Where a sum [rows] under an anchored maximum is not to be trusted. Also where it is NaN:
    infinity that a later rescaling multiplied with 0."""
    return (total <= OVERFLOW) == 0


@gluon.jit
def any_overflowed(total):
    """Whether one of a warpgroup's is: its warps meet three times."""
    return gl.max(gl.where(overflowed(total), 1, 0), 0) > 0


@gluon.jit
def scaled(total, alpha):
    """Sums, one a row or in parts, times alpha [rows]."""
    if len(total.shape) == 2:
        layout: gl.constexpr = parts_layout(total.shape[0])
        return total * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, layout)), 1)
    else:
        return total * alpha


@gluon.jit
def add(total, p):
    """Sums, one a row or in parts, with those of weights p [rows, columns]."""
    if len(total.shape) == 2:
        rows: gl.constexpr = p.shape[0]
        parts = gl.sum(p.reshape([rows, p.shape[1] // 8, 8]), 1)
        return total + gl.convert_layout(parts, parts_layout(rows))
    else:
        return total + gl.sum(p, 1)


@gluon.constexpr_function
def parts_layout(rows):
    """Of [rows, 8] sums, 16 rows a warp: each thread has the columns that it has of every 8 scores."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range((rows // 16).bit_length() - 1)],
        block_bases=[],
        shape=[rows, 8],
    )


@gluon.jit
def in_parts(softmax, rows: gl.constexpr):
    """A starting state whose sums are kept in eight parts a row, which saves the exchange between
    lanes in every step."""
    layout: gl.constexpr = parts_layout(rows)
    first = gl.arange(0, 8, gl.SliceLayout(0, layout)) == 0
    total = gl.expand_dims(gl.convert_layout(softmax.total, gl.SliceLayout(1, layout)), 1)
    return OnlineSoftmax(softmax.maximum, gl.where(gl.expand_dims(first, 0), total, 0.0))


@gluon.jit
def start_softmax(rows: gl.constexpr, layout: gl.constexpr):
    """The state before any key."""
    return OnlineSoftmax(
        gl.full([rows], NO_MAXIMUM, gl.float32, layout), gl.full([rows], 0.0, gl.float32, layout)
    )


@gluon.jit
def start_softmax_at_sink(sink, rows: gl.constexpr, layout: gl.constexpr):
    """The state after one key of logit `sink` (natural units, -inf: none) and value 0."""
    sinks = gl.full([rows], 0.0, gl.float32, layout) + sink * LOG2_E
    total = gl.where(sinks > NO_MAXIMUM, 1.0, 0.0)
    return OnlineSoftmax(gl.maximum(sinks, NO_MAXIMUM), total)


@gluon.jit
def soft_cap(s, inner, outer):
    """outer * tanh(inner * s), to float32 accuracy; inner and outer fold the scales around it."""
    return outer - 2.0 * outer / (gl.exp2(s * (2.0 * LOG2_E * inner)) + 1.0)


@gluon.constexpr_function
def _vote_asm():
    return (
        "{ .reg .pred p, q; setp.neu.f32 p, $2, 0f3F800000; setp.neu.f32 q, $3, 0f3F800000; "
        "or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; "
        "selp.b32 $0, 1, 0, p; selp.b32 $1, 1, 0, p; }"
    )


@gluon.constexpr_function
def _scale_asm(count):
    flag = 3 * count
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{ .reg .pred p; setp.ne.b32 p, ${flag}, 0; @!p bra SAME_${{:uid}}; "
        f"{products} SAME_${{:uid}}: }}"
    )


@gluon.constexpr_function
def _scale_constraints(count):
    tied = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + tied + ["f"] * count + ["r"] * count)


@gluon.jit
def rescale(
    o,  # [64, columns] float32
    alpha,  # [64]
    columns: gl.constexpr,
    lazy: gl.constexpr,
):
    """o * alpha per row; with `lazy`, warps whose rows all have alpha = 1 skip the products.

    The branch is one inline instruction sequence over all registers of a thread, taken by a vote
    of its warp: Triton has no branch on a value that differs between warps.
    """
    if lazy:
        changed = gl.inline_asm_elementwise(
            _vote_asm(), "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=False, pack=2
        )
        return gl.inline_asm_elementwise(
            _scale_asm(columns // 2),
            _scale_constraints(columns // 2),
            [o, gl.expand_dims(alpha, 1), gl.expand_dims(changed, 1)],
            dtype=gl.float32,
            is_pure=True,
            pack=columns // 2,
        )
    else:
        return o * gl.expand_dims(alpha, 1)

"""One row of activations times int4 codes, in whole numbers on the tensor core.

A warp multiplies a stretch of k, blocks of 128. The largest of its activations has the exponent e: x is
X 2^(e - 28), X a whole number of 30 bits, written as four digits of base 256, -128 to 127. So products of
digits and codes are sums of whole numbers, exact, and what is lost is what float32 would lose beside
the largest activation. A row fills one of the tensor core's eight columns; here its four digits fill
four, and two groups of 32 fill all: a group's sums must be by themselves until its scale multiplies
them. That is 2 instructions to make a word of codes an operand, where bfloat16 took 11.

    left    bytes of 16 rows of the weight: codes 0 to 15, or 16 times codes -8 to 7
    right   digits, in the columns of a group, and 0 in those of the other
    sums    of 32 products, as float32 numbers: the product begins with the bits of 1.5 2^23

Of a byte of codes one is in the lower half and one in the upper. Masked, the lower is 0 to 15, from
which 8 has still to be subtracted: the products of 8 with all digits are made once (`products_of_zero`).
The upper with its highest bit turned is 16 (code - 8), so its activations are divided by 16.

Logical axes below: block; group of a block as [late 2, odd 2]; q 4 and element 8 of a group (k = 8 q +
element); digit 4, the most significant first. Elements 0, 1, 4, 5 are in lower halves, 2, 3, 6, 7 in
upper ones: an element is [four's high bit 2, half 2, four's low bit 2].
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rooftile.kernels.gluon.gemm.codes import BLOCK, GROUP, along, bits, sliced, sums_layout

DIGITS = gl.constexpr(4)
_ONE_AND_A_HALF = gl.constexpr(0x4B400000)  # 1.5 2^23: with n added to its bits it is 1.5 2^23 + n
_LEAST_EXPONENT = gl.constexpr(-90)  # smaller activations are taken beside one of this


@gluon.constexpr_function
def _row_layout(warps_k, blocks):
    """Of activations [warps, blocks, late, odd, q, element] as they are read, each by one thread."""
    if blocks > 1:
        elements, lane = bits(6, 8, 5), bits(6, 2, 1)
    else:
        elements, lane = bits(6, 2, 5) + bits(6, 8, 5, 4), bits(6, 4, 5, 2)
    return gl.DistributedLinearLayout(
        reg_bases=elements + bits(6, blocks, 1, 2),
        lane_bases=bits(6, 4, 4) + bits(6, 2, 3) + lane + bits(6, 2, 2),
        warp_bases=bits(6, warps_k, 0),
        block_bases=[],
        shape=[warps_k, blocks, 2, 2, 4, 8],
    )


@gluon.constexpr_function
def _fours_layout(warps_k, blocks):
    """The same as [.., q, half, four 2, 2], fours side by side."""
    half, lane = (bits(8, 2, 5), bits(8, 2, 1)) if blocks > 1 else ([], bits(8, 2, 5))
    return gl.DistributedLinearLayout(
        reg_bases=bits(8, 2, 7) + bits(8, 2, 6) + half + bits(8, blocks, 1, 2),
        lane_bases=bits(8, 4, 4) + bits(8, 2, 3) + lane + bits(8, 2, 2),
        warp_bases=bits(8, warps_k, 0),
        block_bases=[],
        shape=[warps_k, blocks, 2, 2, 4, 2, 2, 2],
    )


@gluon.constexpr_function
def _digits_layout(warps_k, blocks):
    """Of words [warps, blocks, late, odd, q, digit, half], a thread those of one digit and one group in two."""
    return gl.DistributedLinearLayout(
        reg_bases=bits(7, 2, 6) + bits(7, 2, 3) + bits(7, blocks, 1),
        lane_bases=bits(7, 4, 4) + bits(7, 4, 5) + bits(7, 2, 2),
        warp_bases=bits(7, warps_k, 0),
        block_bases=[],
        shape=[warps_k, blocks, 2, 2, 4, 4, 2],
    )


@gluon.jit
def fetch_row(row, k, block0, warps_k: gl.constexpr, blocks: gl.constexpr):
    """Activations of the blocks from block0 on, [warps, blocks, late, odd, q, element]; 0 from k on.

    row: pointer, on a multiple of 16 bytes; k: a multiple of 8.
    """
    L: gl.constexpr = _row_layout(warps_k, blocks)
    block = block0 + along(warps_k, 0, 6, L) * blocks + along(blocks, 1, 6, L)
    group = 2 * along(2, 2, 6, L) + along(2, 3, 6, L)
    at = block * BLOCK + group * GROUP + along(4, 4, 6, L) * 8 + along(8, 5, 6, L)
    pointers = gl.max_contiguous(gl.multiple_of(row + at, [1, 1, 1, 1, 1, 16]), [1, 1, 1, 1, 1, 8])
    return gl.load(pointers, mask=at < k // 8 * 8, other=0.0)


@gluon.constexpr_function
def _turn_asm():
    """Of four words $4 to $7 (and $8 to $11) the second byte, then the first with its highest bit turned."""
    lines = ["{ .reg .b32 a, b;"]
    for out, word in ((0, 4), (2, 8)):
        lines += [
            f"prmt.b32 a, ${word}, ${word + 2}, 0x5140;",
            f"prmt.b32 b, ${word + 1}, ${word + 3}, 0x5140;",
            f"prmt.b32 ${out}, a, b, 0x7632;",
            "prmt.b32 a, a, b, 0x5410;",
            f"xor.b32 ${out + 1}, a, 0x80808080;",
        ]
    return " ".join([*lines, "}"])


@gluon.jit
def _power(exponent):
    """2^exponent in float32, by its bits; exponent: int32 from -126 to 127."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _of_warp(x, rank: gl.constexpr, layout: gl.constexpr):
    """x [warps] as [warps, 1, ..] of so many axes."""
    x = gl.convert_layout(x, sliced(rank, 0, layout))
    for d in gl.static_range(rank - 1):
        x = gl.expand_dims(x, d + 1)
    return x


@gluon.jit
def _digits(x, warps_k: gl.constexpr, blocks: gl.constexpr):
    """x as words of digits [.., q, digit, half], and the exponent e of a warp's largest, [warps] int32.

    The first two digits are x 2^(13 - e), the others what is left of it, times 2^15, both rounded: added
    to 1.5 2^23 they are the last bits of a float32 number. 128 more makes bytes digits but for the highest
    bit of the second.
    """
    x = x.to(gl.float32)
    size = x.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    largest = gl.max(size.reshape([warps_k, blocks * BLOCK]), 1)
    exponent = gl.maximum((largest >> 23) - 127, _LEAST_EXPONENT)
    L: gl.constexpr = _fours_layout(warps_k, blocks)
    of_all = _of_warp(exponent, 8, L) + 4 * along(2, 5, 8, L)  # upper halves are 16 times the codes
    x = x.reshape([warps_k, blocks, 2, 2, 4, 2, 2, 2]).permute(0, 1, 2, 3, 4, 6, 5, 7)
    x = gl.convert_layout(x, L, assert_trivial=True)
    shift: gl.constexpr = 12582912.0 + 128.0
    first = x * _power(13 - of_all) + shift
    left = x - (first - shift) * _power(of_all - 13)
    second = left * _power(28 - of_all) + shift
    words = gl.inline_asm_elementwise(
        _turn_asm(), "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [first.to(gl.int32, bitcast=True), second.to(gl.int32, bitcast=True)],
        dtype=gl.int32, is_pure=True, pack=4,
    )  # fmt: skip
    words = words.reshape([warps_k, blocks, 2, 2, 4, 2, DIGITS]).permute(0, 1, 2, 3, 4, 6, 5)
    # Of numbers that are not finite no digits are right.
    exponent = gl.where(largest < 0x7F800000, exponent, 128)
    return gl.convert_layout(words, _digits_layout(warps_k, blocks)), exponent


@gluon.constexpr_function
def _bytes_asm():
    return " ".join(f"mov.b32 ${i}, ${i + 4};" for i in range(4))


@gluon.jit
def as_right(x, warps_k: gl.constexpr, blocks: gl.constexpr):
    """What `fetch_row` read as a right operand [blocks odd warps, 64, 8], and the unit of its last digit,
    [warps] float32: NaN if an activation is not finite."""
    words, exponent = _digits(x, warps_k, blocks)
    unit = gl.where(exponent < 128, _power(gl.minimum(exponent, 127) - 28), float("nan"))
    owner = along(2, 2, 7, _digits_layout(warps_k, blocks))
    both = gl.join(gl.where(owner == 0, words, 0), gl.where(owner == 1, words, 0))
    # Of words [.., half, late] four tensors of bytes, whose places half and late are a byte's number.
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        _bytes_asm(), "=r,=r,=r,=r,r,r,r,r", [both],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    b = gl.join(gl.join(b0, b2), gl.join(b1, b3))
    # [warps, blocks, owner, odd, q, digit, byte 2, byte 2, half, late]
    b = b.permute(1, 3, 0, 9, 8, 4, 6, 7, 2, 5)
    b = b.reshape([blocks * 2 * warps_k, 2 * GROUP, 2 * DIGITS])
    sums: gl.constexpr = sums_layout(warps_k)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums, k_width=4)
    return gl.convert_layout(b, right, assert_trivial=True), unit


@gluon.constexpr_function
def _halves_asm():
    """Of four words lower and upper halves of their bytes, the upper ones with the highest bit turned."""
    lines = []
    for word in range(4):
        lines += [
            f"and.b32 ${2 * word}, ${8 + word}, 0x0f0f0f0f;",
            f"lop3.b32 ${2 * word + 1}, ${8 + word}, 0x80808080, 0xf0f0f0f0, 0x28;",
        ]
    return " ".join(lines)


@gluon.jit
def as_left(words, warps_k: gl.constexpr, blocks: gl.constexpr, tile: gl.constexpr):
    """words [warps, blocks, tile, q, group] as a left operand [blocks odd warps, 16, 64]; 0 below 8 rows."""
    l0, h0, l1, h1, l2, h2, l3, h3 = gl.inline_asm_elementwise(
        _halves_asm(), "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words],
        dtype=(gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip
    even = gl.join(gl.join(l0, h0), gl.join(l2, h2))
    odd = gl.join(gl.join(l1, h1), gl.join(l3, h3))
    a = gl.join(even, odd)  # [warps, blocks, tile, q, byte, half, late, odd]
    a = a.permute(1, 7, 0, 2, 6, 5, 3, 4).reshape([blocks * 2 * warps_k, tile, 2 * GROUP])
    if tile == 8:
        a = gl.join(a, a ^ a).permute(0, 3, 1, 2).reshape([blocks * 2 * warps_k, 16, 2 * GROUP])
    left: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sums_layout(warps_k), k_width=4
    )
    return gl.convert_layout(a, left, assert_trivial=True)


@gluon.jit
def _multiply(left, right, warps_k: gl.constexpr, blocks: gl.constexpr):
    """1.5 2^23 + sums, [blocks odd warps, 16, owner digit] float32."""
    sums: gl.constexpr = sums_layout(warps_k)
    bits = gl.full([blocks * 2 * warps_k, 16, 2 * DIGITS], _ONE_AND_A_HALF, gl.int32, sums)
    return mma_v2(left, right, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _first_eight(x):
    """Of sums [.., 16, columns] the first eight rows."""
    x, _ = x.reshape([x.shape[0], 2, 8, x.shape[2]]).permute(0, 2, 3, 1).split()
    return x


@gluon.jit
def products_of_zero(right, warps_k: gl.constexpr, blocks: gl.constexpr):
    """What `_multiply` makes of the codes of 0, [blocks odd warps, 8, owner digit]: alike in all rows."""
    left: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=sums_layout(warps_k), k_width=4
    )
    place = along(2 * GROUP, 2, 3, left)
    zeros = gl.zeros([blocks * 2 * warps_k, 16, 2 * GROUP], gl.int8, left)
    codes = zeros + gl.where(place // 16 % 2 == 0, 8, 0).to(gl.int8)  # of lower halves
    return _first_eight(_multiply(codes, right, warps_k, blocks))


@gluon.constexpr_function
def _parts_layout(warps_k, blocks, tile):
    """Of sums [blocks, odd, warps, tile, owner, pair of digits]."""
    return gl.DistributedLinearLayout(
        reg_bases=bits(6, tile, 3, 8) + bits(6, 2, 1) + bits(6, blocks, 0),
        lane_bases=bits(6, 2, 5) + bits(6, 2, 4) + bits(6, 8, 3),
        warp_bases=bits(6, warps_k, 2),
        block_bases=[],
        shape=[blocks, 2, warps_k, tile, 2, 2],
    )


@gluon.constexpr_function
def scale_box(warps_k, blocks):
    """Words of two scales in a row of a box of a step, and boxes of a step."""
    words = 2 * blocks * warps_k
    return min(words, 32), max(words // 32, 1)


@gluon.constexpr_function
def _scales_layout(warps_k, blocks, tile):
    """Of words [boxes tile, words of a row], each where a scale is multiplied with."""
    width = scale_box(warps_k, blocks)[0]

    def words(first, end):
        places = [first << i for i in range((end // first).bit_length() - 1)]
        return [[0, n] if n < width else [n // width * tile, 0] for n in places]

    return gl.DistributedLinearLayout(
        reg_bases=bits(2, tile, 0, 8) + words(2, 2 * blocks),
        lane_bases=[[0, 0], *words(1, 2), *bits(2, 8, 0)],  # pairs of digits have the same scale
        warp_bases=words(2 * blocks, 2 * blocks * warps_k),
        block_bases=[],
        shape=[scale_box(warps_k, blocks)[1] * tile, width],
    )


@gluon.jit
def scales_of(boxes, warps_k: gl.constexpr, blocks: gl.constexpr, tile: gl.constexpr):
    """Scales float32 [blocks, odd, warps, tile, late, 1] of boxes in shared memory, [boxes tile, words]:
    a word has the scales of groups 2 late and 2 late + 1."""
    pairs = boxes.load(_scales_layout(warps_k, blocks, tile))
    pairs = pairs.reshape([boxes.shape[0] // tile, tile, boxes.shape[1]]).permute(1, 0, 2)
    pairs = pairs.reshape([tile, warps_k, blocks, 2]).permute(2, 1, 0, 3)
    even = (pairs << 16).to(gl.float32, bitcast=True)
    odd = (pairs & -0x10000).to(gl.float32, bitcast=True)
    both = gl.join(even, odd).permute(0, 4, 1, 2, 3)
    parts: gl.constexpr = gl.SliceLayout(5, _parts_layout(warps_k, blocks, tile))
    return gl.expand_dims(gl.convert_layout(both, parts, assert_trivial=True), 5)


@gluon.constexpr_function
def totals_layout(warps_k, tile):
    """Of sums [warps, tile, owner, pair of digits]."""
    return gl.DistributedLinearLayout(
        reg_bases=bits(4, tile, 1, 8),
        lane_bases=bits(4, 2, 3) + bits(4, 2, 2) + bits(4, 8, 1),
        warp_bases=bits(4, warps_k, 0),
        block_bases=[],
        shape=[warps_k, tile, 2, 2],
    )


@gluon.jit
def multiply(
    left, scales, right, zero, unit, warps_k: gl.constexpr, blocks: gl.constexpr,
    tile: gl.constexpr,
):  # fmt: skip
    """A step's part of the result, [warps, tile, owner, pair of digits], to be summed but for `tile`.

    left as of `as_left`, scales of `scales_of`, right and unit of `as_right`, zero of `products_of_zero`.
    """
    x = _multiply(left, right, warps_k, blocks)
    if tile == 8:
        x = _first_eight(x) - zero
    else:
        twice = gl.join(zero, zero).permute(0, 3, 1, 2).reshape(x.shape)
        x = x - gl.convert_layout(twice, sums_layout(warps_k), assert_trivial=True)
    high, low = x.reshape([blocks, 2, warps_k, tile, 2, 2, 2]).split()
    parts: gl.constexpr = _parts_layout(warps_k, blocks, tile)
    x = gl.convert_layout(high * 256 + low, parts, assert_trivial=True)
    x = gl.sum(gl.sum(x * scales, 0), 0)
    L: gl.constexpr = totals_layout(warps_k, tile)
    pair = gl.where(along(2, 3, 4, L) == 0, 32768.0, 1.0)
    return gl.convert_layout(x, L, assert_trivial=True) * (_of_warp(unit, 4, L) * pair)

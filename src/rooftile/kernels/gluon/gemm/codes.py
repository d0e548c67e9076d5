"""int4 weights on their way from memory to the tensor core, dequantised in registers.

A weight [n, k] is codes 0 to 15 and a bfloat16 scale for every 32 along k; its values are (code - 8)
scale, rounded to bfloat16. A word has eight codes, and the words of 128 along k lie so that what a
thread reads at a time, four words, are the codes that it needs in four groups: word 4 q + w has
k = 32 w + 8 q to 32 w + 8 q + 7, of which element 2 p is bits 4 p to 4 p + 3, and 2 p + 1 the same
bits 16 further up. So a pair is one operation away from two bfloat16 numbers: 0x4300 + code is
128 + code. kernels/reference/int4_words.py packs them.
"""
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

GROUP = gl.constexpr(32)  # along k, with one scale
BLOCK = gl.constexpr(128)  # along k, whose words lie together
WORDS = gl.constexpr(16)  # of a block


@gluon.constexpr_function
def _words_layout(tile, blocks, warps_k):
    """Of words [warps_k, tile, blocks, 4, 4]: as a left operand of the tensor core, which has rows 1, 2
    and 4 and a thread's place along k in a warp's lanes."""

    def bits(n, dimension, first=1):
        found = []
        while first < n:
            basis = [0] * 5
            basis[dimension] = first
            found.append(basis)
            first *= 2
        return found

    return gl.DistributedLinearLayout(
        reg_bases=bits(4, 4) + bits(tile, 1, 8) + bits(blocks, 2),
        lane_bases=bits(4, 3) + bits(8, 1),
        warp_bases=bits(warps_k, 0),
        block_bases=[],
        shape=[warps_k, tile, blocks, 4, 4],
    )


@gluon.jit
def _axis(n: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 .. n - 1 along one of five axes."""
    if axis == 0:
        x = gl.arange(
            0, n, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
        )
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3), 4)
    elif axis == 1:
        x = gl.arange(
            0, n, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
        )
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 2), 3), 4)
    elif axis == 2:
        x = gl.arange(
            0, n, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
        )
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 3), 4)
    elif axis == 3:
        x = gl.arange(
            0, n, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
        )
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2), 4)
    else:
        x = gl.arange(
            0, n, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
        )
        return gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 1), 2), 3)


@gluon.constexpr_function
def _dequantise():
    """Eight bfloat16 numbers of a word ($8) and its scale ($9)."""
    lines = [".reg .b32 word, pair, scale, middle;"]
    lines += ["mov.b32 scale, {$9, $9};", "mov.b32 middle, 0x43084308;", "mov.b32 word, $8;"]
    for p in range(4):
        if p:
            lines.append("shr.u32 word, word, 4;")
        lines += [
            "lop3.b32 pair, word, 0x000f000f, 0x43004300, 0xea;",
            "sub.bf16x2 pair, pair, middle;",
            "mul.bf16x2 pair, pair, scale;",
            f"mov.b32 {{${2 * p}, ${2 * p + 1}}}, pair;",
        ]
    return "{" + " ".join(lines) + "}"


@gluon.jit
def fetch_codes(
    words, scales, stride, rows, row0, k, k0, tile: gl.constexpr, tile_k: gl.constexpr,
    warps_k: gl.constexpr,
):  # fmt: skip
    """Words and scales [warps_k, tile, blocks, 4, 4] of k0 on, 0 beyond k.

    words: pointer, [rows, stride] int32, on multiples of 16 bytes. scales: pointer, [rows, stride / 4]
    bfloat16.
    """
    blocks: gl.constexpr = tile_k // BLOCK
    L: gl.constexpr = _words_layout(tile, blocks, warps_k)
    block = k0 // BLOCK + _axis(warps_k, 0, L) * blocks + _axis(blocks, 2, L)
    row = gl.minimum(row0 + _axis(tile, 1, L), rows - 1).to(gl.int64)
    within = _axis(4, 3, L) * 4 + _axis(4, 4, L)
    word_at = words + row * stride + block * WORDS + within
    word_at = gl.max_contiguous(gl.multiple_of(word_at, [1, 1, 1, 16, 16]), [1, 1, 1, 4, 4])
    scale_at = scales + row * (stride // 4) + block * 4 + _axis(4, 4, L)
    scale_at = gl.max_contiguous(gl.multiple_of(scale_at, [1, 1, 1, 1, 8]), [1, 1, 1, 1, 4])
    # Masks where none are needed, too: without them the compiler has fewer loads under way at a time
    # (6144 x 4096 9.6 microseconds instead of 7.7).
    inside = (block * BLOCK < k) & (row >= 0)
    return gl.load(word_at, mask=inside, other=0), gl.load(scale_at, mask=inside, other=0.0)


@gluon.jit
def dequantised(word, scale, layout: gl.constexpr):
    """Values [warps_k, tile, tile_k] of words, in the layout of a left operand."""
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        _dequantise(),
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h",
        [word, scale],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )
    even_half = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd_half = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    values = gl.join(even_half, odd_half)  # [warps_k, tile, blocks, q, w, bit 2, bit 1, bit 0]
    values = values.permute(0, 1, 2, 4, 3, 5, 6, 7)
    values = values.reshape([word.shape[0], word.shape[1], word.shape[2] * BLOCK])
    return gl.convert_layout(values, layout, assert_trivial=True)


@gluon.constexpr_function
def _unpack(centred):
    """Eight bfloat16 numbers of a word ($8): 128 + code, or code - 8."""
    lines = [".reg .b32 word, pair, middle;", "mov.b32 middle, 0x43084308;", "mov.b32 word, $8;"]
    for p in range(4):
        if p:
            lines.append("shr.u32 word, word, 4;")
        lines.append("lop3.b32 pair, word, 0x000f000f, 0x43004300, 0xea;")
        if centred:
            lines.append("sub.bf16x2 pair, pair, middle;")
        lines.append(f"mov.b32 {{${2 * p}, ${2 * p + 1}}}, pair;")
    return "{" + " ".join(lines) + "}"


@gluon.jit
def _unscaled(word, left: gl.constexpr, centred: gl.constexpr):
    """[warps_k, tile, tile_k] of words [warps_k, tile, blocks, 4, 4]: 128 + code, or code - 8."""
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        _unpack(centred),
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [word],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )
    even_half = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd_half = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    values = gl.join(even_half, odd_half)  # [warps_k, tile, blocks, q, w, bit 2, bit 1, bit 0]
    values = values.permute(0, 1, 2, 4, 3, 5, 6, 7)
    values = values.reshape([word.shape[0], word.shape[1], word.shape[2] * BLOCK])
    return gl.convert_layout(values, left, assert_trivial=True)


@gluon.jit
def _halves_of_k(x, axis: gl.constexpr, layout: gl.constexpr):
    """Both halves of x [a, b, c] along axis 1 or 2."""
    a: gl.constexpr = x.shape[0]
    b: gl.constexpr = x.shape[1]
    c: gl.constexpr = x.shape[2]
    if axis == 2:
        first, second = x.reshape([a, b, 2, c // 2]).permute(0, 1, 3, 2).split()
    else:
        first, second = x.reshape([a, 2, b // 2, c]).permute(0, 2, 3, 1).split()
    first = gl.convert_layout(first, layout, assert_trivial=True)
    second = gl.convert_layout(second, layout, assert_trivial=True)
    return first, second


@gluon.jit
def _add_groups(
    acc, values, scale, b, sums: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    centred: gl.constexpr,
):  # fmt: skip
    """acc plus products of groups, each times its scale. values [w, tile, k], scale [w, tile, groups],
    b [w, k, rows]."""
    groups: gl.constexpr = scale.shape[2]
    if groups == 1:
        zero = gl.zeros(acc.shape, gl.float32, sums)
        if not centred:
            # Of 128 + code, 136 too much, in every row alike.
            middle = gl.full(values.shape, -136.0, gl.bfloat16, left)
            zero = mma_v2(middle, b, zero)
        product = mma_v2(values, b, zero)
        factor = gl.convert_layout(
            scale.reshape([scale.shape[0], scale.shape[1]]), gl.SliceLayout(2, sums),
            assert_trivial=True,
        )  # fmt: skip
        return acc + product * gl.expand_dims(factor.to(gl.float32), 2)
    else:
        values0, values1 = _halves_of_k(values, 2, left)
        b0, b1 = _halves_of_k(b, 1, right)
        scale0, scale1 = (
            scale.reshape([scale.shape[0], scale.shape[1], 2, groups // 2])
            .permute(0, 1, 3, 2)
            .split()
        )
        acc = _add_groups(acc, values0, scale0, b0, sums, left, right, centred)
        return _add_groups(acc, values1, scale1, b1, sums, left, right, centred)


@gluon.jit
def add_product(
    acc, word, scale, b, sums: gl.constexpr, left: gl.constexpr, right: gl.constexpr,
    centred: gl.constexpr,
):  # fmt: skip
    """acc [warps_k, tile, rows] plus the product of codes and b [warps_k, tile_k, rows].

    Codes are multiplied as whole numbers, and a scale is applied to the sum of its group: two
    operations a word instead of eight for the codes.
    """
    groups: gl.constexpr = scale.shape[2] * scale.shape[4]
    values = _unscaled(word, left, centred)
    scale = scale.reshape([scale.shape[0], scale.shape[1], groups])
    return _add_groups(acc, values, scale, b, sums, left, right, centred)

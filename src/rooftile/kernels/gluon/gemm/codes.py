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

from rooftile.kernels.gluon.gemm import codes_plan

GROUP = gl.constexpr(32)  # along k, with one scale
BLOCK = gl.constexpr(codes_plan.BLOCK)  # along k, whose words lie together
WORDS = gl.constexpr(codes_plan.BLOCK_WORDS)  # of a block


@gluon.constexpr_function
def bits(rank, n, dimension, first=1):
    """first, 2 first, .. below n along one of `rank` dimensions."""
    found = []
    while first < n:
        basis = [0] * rank
        basis[dimension] = first
        found.append(basis)
        first *= 2
    return found


@gluon.constexpr_function
def sums_layout(warps_k):
    """Of sums [warps along k, rows of the weight, rows of activations, or groups of one]."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[warps_k, 1, 1], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def sliced(rank, axis, layout):
    """Of what is `layout` along one of `rank` axes."""
    for d in reversed(range(rank)):
        if d != axis:
            layout = gl.SliceLayout(d, layout)
    return layout


@gluon.jit
def along(n: gl.constexpr, axis: gl.constexpr, rank: gl.constexpr, layout: gl.constexpr):
    """0 .. n - 1 along one of `rank` axes."""
    x = gl.arange(0, n, sliced(rank, axis, layout))
    for d in gl.static_range(rank):
        if d != axis:
            x = gl.expand_dims(x, d)
    return x


@gluon.constexpr_function
def _words_layout(tile, blocks, warps_k):
    """Of words [warps_k, tile, blocks, 4, 4]: as a left operand of the tensor core, which has rows 1, 2
    and 4 and a thread's place along k in a warp's lanes."""

    return gl.DistributedLinearLayout(
        reg_bases=bits(5, 4, 4) + bits(5, tile, 1, 8) + bits(5, blocks, 2),
        lane_bases=bits(5, 4, 3) + bits(5, 8, 1),
        warp_bases=bits(5, warps_k, 0),
        block_bases=[],
        shape=[warps_k, tile, blocks, 4, 4],
    )


@gluon.constexpr_function
def _dequantise():
    """Eight bfloat16 numbers of a word ($8), times its scale ($9)."""
    lines = [".reg .b32 word, pair, scale, middle;", "mov.b32 scale, {$9, $9};"]
    lines += ["mov.b32 middle, 0x43084308;", "mov.b32 word, $8;"]
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
    block = k0 // BLOCK + along(warps_k, 0, 5, L) * blocks + along(blocks, 2, 5, L)
    row = gl.minimum(row0 + along(tile, 1, 5, L), rows - 1).to(gl.int64)
    within = along(4, 3, 5, L) * 4 + along(4, 4, 5, L)
    word_at = words + row * stride + block * WORDS + within
    word_at = gl.max_contiguous(gl.multiple_of(word_at, [1, 1, 1, 16, 16]), [1, 1, 1, 4, 4])
    scale_at = scales + row * (stride // 4) + block * 4 + along(4, 4, 5, L)
    scale_at = gl.max_contiguous(gl.multiple_of(scale_at, [1, 1, 1, 1, 8]), [1, 1, 1, 1, 4])
    # Masks where none are needed, too: without them the compiler has fewer loads under way at a time
    # (6144 x 4096 9.6 microseconds instead of 7.7).
    inside = (block * BLOCK < k) & (row >= 0)
    return gl.load(word_at, mask=inside, other=0), gl.load(scale_at, mask=inside, other=0.0)


@gluon.jit
def _eight(word, scale):
    """The values of words [..], by the bits of their places: [.., bit 2, bit 1, bit 0]."""
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
    return gl.join(even_half, odd_half)


@gluon.jit
def dequantised(word, scale, layout: gl.constexpr):
    """Values [warps_k, tile, tile_k] of words, in the layout of a left operand (k_width 8)."""
    values = _eight(word, scale)  # [warps_k, tile, blocks, q, w, bit 2, bit 1, bit 0]
    values = values.permute(0, 1, 2, 4, 3, 5, 6, 7)
    values = values.reshape([word.shape[0], word.shape[1], word.shape[2] * BLOCK])
    return gl.convert_layout(values, layout, assert_trivial=True)

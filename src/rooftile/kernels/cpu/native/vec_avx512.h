// Sixteen lanes in one AVX-512 register. ROOFTILE_VNNI and ROOFTILE_BF16 say what else there is.

struct F { __m512 v; };
struct I { __m512i v; };
struct B { __m512i v; };  // 64 bytes

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_part(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F zero() { return {_mm512_setzero_ps()}; }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in b is kept, one in a is not.
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline float sum(F a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }
inline F nearest(F a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F times_power_of_two(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }

// 2^x to 2^-18, for x up to 127: 2^floor(x) times the polynomial of least relative error on [0, 1].
inline F exp2_quick(F x) {
    F r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // of -inf: 0
    F p = fma(set1(0.013426685f), r, set1(0.052242473f));
    p = fma(p, r, set1(0.2412802f));
    p = fma(p, r, set1(0.69304484f));
    return {_mm512_scalef_ps(fma(p, r, set1(1.0f)).v, x.v)};
}

// Lanes [from, to) of x, -inf in the others.
inline F keep(F x, int from, int to) {
    from = from < 0 ? 0 : from > 16 ? 16 : from;
    to = to < from ? from : to > 16 ? 16 : to;
    auto mask = static_cast<__mmask16>(((1u << to) - 1) & ~((1u << from) - 1));
    return {_mm512_mask_blend_ps(mask, _mm512_set1_ps(-INFINITY), x.v)};
}

inline F widen_bf16(__m256i x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline __m256i narrow_bf16(F x) {
    __m512i u = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q),
                              _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(r);
}
inline F load(const bf16* p) {
    return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F load_part(const bf16* p, int n) {
    return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline void store(bf16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(x));
}
inline void store_part(bf16* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(x));
}
inline F load(const half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F load_part(const half* p, int n) {
    return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
inline void store(half* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_part(half* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}

inline I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
inline int32_t sum(I a) { return _mm512_reduce_add_epi32(a.v); }
inline void store_bytes(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}

inline B load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline B low_nibbles(B x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline B high_nibbles(B x) {
    return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
// acc + w[lane][0..3] . x[0..3], bytes without sign times bytes with sign.
inline I dot4(I acc, B w, const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
#if ROOFTILE_VNNI
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
#else
    // Widened to 16 bits first: sums of two products of bytes would saturate there.
    __m512i xs = _mm512_set1_epi32(four), byte = _mm512_set1_epi16(0xff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(w.v, byte),
                                     _mm512_srai_epi16(_mm512_slli_epi16(xs, 8), 8));
    __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w.v, 8), _mm512_srai_epi16(xs, 8));
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
#endif
}

// acc + w[lane][0] * x[0] + w[lane][1] * x[1] of bfloat16 pairs in 32-bit lanes.
#if ROOFTILE_BF16
using Pair = uint32_t;
inline F dot2(F acc, const uint32_t* w, const uint32_t* x) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w)),
                             reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*x))))};
}
inline void store_quick(bf16* p, F x) {
    __m256bh r = _mm512_cvtneps_pbh(x.v);
    memcpy(p, &r, 32);
}
#endif
inline F even_bf16(const uint32_t* w) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(w), 16))};
}
inline F odd_bf16(const uint32_t* w) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// out[i][lane] = row[lane][i], 16 x 16 words of 32 bits.
inline void transpose(const uint32_t* const* row, int64_t offset, uint32_t* out) {
    __m512i r[16], t[16];
    UNROLL for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(row[i] + offset);
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; ++i) {
        __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        __m512i c = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        _mm512_storeu_si512(out + 16 * i, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(out + 16 * (i + 4), _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(out + 16 * (i + 8), _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(out + 16 * (i + 12), _mm512_shuffle_i32x4(c, d, 0xdd));
    }
}

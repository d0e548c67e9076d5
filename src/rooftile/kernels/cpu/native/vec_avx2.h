// Sixteen lanes in two AVX2 registers, with FMA and F16C.

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct B { __m256i a, b; };  // 64 bytes

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// A NaN in y is kept, one in x is not.
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float sum(F x) {
    __m256 t = _mm256_add_ps(x.a, x.b);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(F x) {
    __m256 t = _mm256_max_ps(x.a, x.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline F nearest(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 exponent(__m256 n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// In two factors, because 2^n alone may lie outside the normal numbers.
inline F times_power_of_two(F x, F n) {
    __m256 half_a = _mm256_floor_ps(_mm256_mul_ps(n.a, _mm256_set1_ps(0.5f)));
    __m256 half_b = _mm256_floor_ps(_mm256_mul_ps(n.b, _mm256_set1_ps(0.5f)));
    x.a = _mm256_mul_ps(_mm256_mul_ps(x.a, exponent(half_a)),
                        exponent(_mm256_sub_ps(n.a, half_a)));
    x.b = _mm256_mul_ps(_mm256_mul_ps(x.b, exponent(half_b)),
                        exponent(_mm256_sub_ps(n.b, half_b)));
    return x;
}
inline F load_part(const float* p, int n) {
    float t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = p[i];
    return load(t);
}
inline void store_part(float* p, F x, int n) {
    float t[16];
    store(t, x);
    for (int i = 0; i < n; ++i) p[i] = t[i];
}

// Lanes [from, to) of x, -inf in the others.
inline F keep(F x, int from, int to) {
    __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
    __m256i f = _mm256_set1_epi32(from - 1), t = _mm256_set1_epi32(to);
    auto inside = [&](__m256i i) {
        return _mm256_castsi256_ps(
            _mm256_and_si256(_mm256_cmpgt_epi32(i, f), _mm256_cmpgt_epi32(t, i)));
    };
    __m256 none = _mm256_set1_ps(-INFINITY);
    return {_mm256_blendv_ps(none, x.a, inside(low)), _mm256_blendv_ps(none, x.b, inside(high))};
}

inline __m256 widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline __m256i narrow_bf16(__m256 x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0),
                              _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline F load(const bf16* p) {
    auto q = reinterpret_cast<const __m128i*>(p);
    return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
inline void store(bf16* p, F x) {
    __m256i both = _mm256_packus_epi32(narrow_bf16(x.a), narrow_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline F load(const half* p) {
    auto q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void store(half* p, F x) {
    auto q = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
template <class T>
inline F load_part(const T* p, int n) {
    T t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = p[i];
    return load(t);
}
template <class T>
inline void store_part(T* p, F x, int n) {
    T t[16];
    store(t, x);
    for (int i = 0; i < n; ++i) p[i] = t[i];
}

inline I set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline int32_t sum(I x) {
    alignas(32) int32_t t[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(t), _mm256_add_epi32(x.a, x.b));
    return t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7];
}
inline void store_bytes(int8_t* p, I x) {
    alignas(32) int32_t t[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(t), x.a);
    _mm256_store_si256(reinterpret_cast<__m256i*>(t + 8), x.b);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(t[i]);
}

inline B load(const uint8_t* p) {
    auto q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline B low_nibbles(B x) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline B high_nibbles(B x) {
    return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// acc + w[lane][0..3] . x[0..3], bytes without sign times bytes with sign.
inline I dot4(I acc, B w, const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    // Widened to 16 bits first: sums of two products of bytes would saturate there.
    __m256i xs = _mm256_set1_epi32(four), byte = _mm256_set1_epi16(0xff);
    __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(xs, 8), 8);
    __m256i x_odd = _mm256_srai_epi16(xs, 8);
    auto half_of = [&](__m256i acc, __m256i w) {
        __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, byte), x_even);
        __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), x_odd);
        return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
    };
    return {half_of(acc.a, w.a), half_of(acc.b, w.b)};
}
inline F even_bf16(const uint32_t* w) {
    auto q = reinterpret_cast<const __m256i*>(w);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
inline F odd_bf16(const uint32_t* w) {
    auto q = reinterpret_cast<const __m256i*>(w);
    __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), high)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), high))};
}

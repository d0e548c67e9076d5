// Sixteen lanes in plain C++, which compilers vectorise as the machine allows.

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct B { uint8_t v[64]; };

template <class Function>
inline F lanes(Function f) {
    F r;
    for (int i = 0; i < 16; ++i) r.v[i] = f(i);
    return r;
}
inline F load(const float* p) { return lanes([&](int i) { return p[i]; }); }
inline void store(float* p, F x) { memcpy(p, x.v, sizeof x.v); }
inline F set1(float x) { return lanes([&](int) { return x; }); }
inline F zero() { return set1(0.0f); }
inline F operator+(F a, F b) { return lanes([&](int i) { return a.v[i] + b.v[i]; }); }
inline F operator-(F a, F b) { return lanes([&](int i) { return a.v[i] - b.v[i]; }); }
inline F operator*(F a, F b) { return lanes([&](int i) { return a.v[i] * b.v[i]; }); }
inline F operator/(F a, F b) { return lanes([&](int i) { return a.v[i] / b.v[i]; }); }
inline F fma(F a, F b, F c) { return lanes([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
// A NaN in b is kept, one in a is not.
inline F max(F a, F b) { return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F min(F a, F b) { return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F abs(F a) { return lanes([&](int i) { return std::fabs(a.v[i]); }); }
inline float sum(F a) {
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) a.v[i] += a.v[i + n];
    return a.v[0];
}
inline float largest(F a) {
    float r = a.v[0];
    for (int i = 1; i < 16; ++i) r = a.v[i] > r ? a.v[i] : r;
    return r;
}
inline F nearest(F a) { return lanes([&](int i) { return std::nearbyint(a.v[i]); }); }
inline F times_power_of_two(F x, F n) {
    return lanes([&](int i) { return std::ldexp(x.v[i], static_cast<int>(n.v[i])); });
}
inline F keep(F x, int from, int to) {
    return lanes([&](int i) { return i >= from && i < to ? x.v[i] : -INFINITY; });
}
inline F load(const bf16* p) { return lanes([&](int i) { return widen(p[i]); }); }
inline F load(const half* p) { return lanes([&](int i) { return widen(p[i]); }); }
inline void store(bf16* p, F x) {
    for (int i = 0; i < 16; ++i) narrow(x.v[i], p[i]);
}
inline void store(half* p, F x) {
    for (int i = 0; i < 16; ++i) narrow(x.v[i], p[i]);
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
inline I set1(int32_t x) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
}
inline I operator+(I a, I b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
}
inline F to_float(I a) { return lanes([&](int i) { return static_cast<float>(a.v[i]); }); }
inline I to_int(F a) {
    I r;
    for (int i = 0; i < 16; ++i) r.v[i] = static_cast<int32_t>(std::nearbyint(a.v[i]));
    return r;
}
inline int32_t sum(I a) {
    int32_t r = 0;
    for (int i = 0; i < 16; ++i) r += a.v[i];
    return r;
}
inline void store_bytes(int8_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}
inline B load(const uint8_t* p) {
    B r;
    memcpy(r.v, p, 64);
    return r;
}
inline B low_nibbles(B x) {
    for (int i = 0; i < 64; ++i) x.v[i] &= 15;
    return x;
}
inline B high_nibbles(B x) {
    for (int i = 0; i < 64; ++i) x.v[i] >>= 4;
    return x;
}
// acc + w[lane][0..3] . x[0..3], bytes without sign times bytes with sign.
inline I dot4(I acc, B w, const int8_t* x) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * x[j];
    return acc;
}
inline F even_bf16(const uint32_t* w) {
    return lanes([&](int i) { return from_bits(w[i] << 16); });
}
inline F odd_bf16(const uint32_t* w) {
    return lanes([&](int i) { return from_bits(w[i] & 0xffff0000u); });
}

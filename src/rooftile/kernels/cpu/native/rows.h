// Operators on rows: norm, rotation, gated activation, softmax of logits.

// e^x to about 2 units in the last place; NaN stays NaN, -inf gives 0.
inline F exp(F x) {
    x = max(set1(-110.0f), min(set1(88.72f), x));
    F n = nearest(x * set1(1.44269504f));
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p * r, r, r + set1(1.0f));
    return times_power_of_two(p, n);
}

inline F activate(F gate, int32_t activation) {
    F z = gate;
    if (activation == GELU_TANH) {
        // gelu_tanh(x) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        z = gate * fma(gate * gate, set1(2 * 0.7978845608f * 0.044715f), set1(2 * 0.7978845608f));
    }
    return gate / (set1(1.0f) + exp(zero() - z));
}

inline float mean_square(const float* x, int64_t n) {
    F total = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) total = fma(load(x + i), load(x + i), total);
    if (i < n) {
        F tail = load_part(x + i, static_cast<int>(n - i));
        total = fma(tail, tail, total);
    }
    return sum(total) / static_cast<float>(n);
}

// y = x / rms(x) * weight
inline void normalise(const float* x, const float* weight, float eps, int64_t n, float* y) {
    F scale = set1(1.0f / std::sqrt(mean_square(x, n) + eps));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        F v = load(x + i) * scale;
        store(y + i, weight ? v * load(weight + i) : v);
    }
    if (i < n) {
        int left = static_cast<int>(n - i);
        F v = load_part(x + i, left) * scale;
        store_part(y + i, weight ? v * load_part(weight + i, left) : v, left);
    }
}

void rms_norm(const void* x, int64_t x_row, const void* residual, int64_t residual_row,
              const void* weight, float offset, float eps, int64_t rows, int64_t hidden, void* out,
              void* stream, int32_t dtype, int threads) {
    // After the rows' scratch: the weight, once for all of them.
    Memory memory(hidden * 4 + 64);
    float* wide = reinterpret_cast<float*>(memory.data);
    if (weight) {
        get(wide, weight, 0, hidden, dtype);
        for (int64_t i = 0; i < hidden; ++i) wide[i] += offset;
    }
    each_token(rows, hidden, threads, [&](int64_t m) {
        float* row = scratch(2 * hidden);
        float* other = row + hidden;
        get(row, x, m * x_row, hidden, dtype);
        if (residual) {
            get(other, residual, m * residual_row, hidden, dtype);
            for (int64_t i = 0; i < hidden; ++i) row[i] += other[i];
        }
        put(stream, m * hidden, row, hidden, dtype);
        if (residual && dtype != FLOAT32) get(row, stream, m * hidden, hidden, dtype);
        normalise(row, weight ? wide : nullptr, eps, hidden, other);
        put(out, m * hidden, other, hidden, dtype);
    });
}

void gated(const void* x, int64_t x_row, int64_t rows, int64_t size, int32_t activation, void* out,
           int32_t dtype, int threads) {
    each_token(rows, 2 * size, threads, [&](int64_t m) {
        float* row = scratch(2 * size);
        float* value = row + size;
        get(row, x, m * x_row, size, dtype);
        get(value, x, m * x_row + size, size, dtype);
        for (int64_t i = 0; i < size; i += 16) {
            int n = size - i < 16 ? static_cast<int>(size - i) : 16;
            store_part(row + i, activate(load_part(row + i, n), activation) * load_part(value + i, n), n);
        }
        put(out, m * size, row, size, dtype);
    });
}

// One head, in place. angles: [2, half]
inline void rotate(float* x, const float* angles, int64_t half, bool interleaved, float sign) {
    const float *cosine = angles, *sine = angles + half;
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            float a = x[2 * i], b = x[2 * i + 1], s = sign * sine[i];
            x[2 * i] = a * cosine[i] - b * s;
            x[2 * i + 1] = b * cosine[i] + a * s;
        }
        return;
    }
    int64_t i = 0;
    F signs = set1(sign);
    for (; i + 16 <= half; i += 16) {
        F a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i) * signs;
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = x[i], b = x[half + i], s = sign * sine[i];
        x[i] = a * cosine[i] - b * s;
        x[half + i] = b * cosine[i] + a * s;
    }
}

void rotary(const void* x, int64_t x_token, int64_t x_head, const int64_t* positions,
            const float* cos_sin, int32_t rotary_half, bool interleaved, bool inverse, int64_t tokens,
            int32_t heads, int32_t dim, void* out, int32_t dtype, int threads) {
    each_token(tokens, static_cast<int64_t>(heads) * dim, threads, [&](int64_t m) {
        float* head = scratch(dim);
        const float* angles = cos_sin + positions[m] * 2 * rotary_half;
        for (int64_t h = 0; h < heads; ++h) {
            get(head, x, m * x_token + h * x_head, dim, dtype);
            rotate(head, angles, rotary_half, interleaved, inverse ? -1.0f : 1.0f);
            put(out, (m * heads + h) * dim, head, dim, dtype);
        }
    });
}

inline int64_t dtype_bytes(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }
inline char* slot_of(const Pages& pages, int64_t slot, int64_t head, int32_t page_size, int32_t dtype) {
    int64_t at = slot / page_size * pages.page + head * pages.head + slot % page_size * pages.slot;
    return pages.data + at * dtype_bytes(dtype);
}

void append(const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
            int64_t v_head, const Pages& k_pages, const Pages& v_pages, const int64_t* slots,
            const int64_t* positions, const float* cos_sin, int32_t rotary_half, bool interleaved,
            int64_t tokens, int32_t heads, int32_t k_dim, int32_t v_dim, int32_t page_size,
            int32_t dtype, int threads) {
    int64_t bytes = dtype_bytes(dtype);
    each_token(tokens, static_cast<int64_t>(heads) * (k_dim + v_dim), threads, [&](int64_t m) {
        if (slots[m] < 0) return;
        float* head = scratch(k_dim);
        for (int64_t h = 0; h < heads; ++h) {
            char* to = slot_of(k_pages, slots[m], h, page_size, dtype);
            int64_t from = m * k_token + h * k_head;
            if (cos_sin) {
                get(head, k, from, k_dim, dtype);
                rotate(head, cos_sin + positions[m] * 2 * rotary_half, rotary_half, interleaved, 1.0f);
                put(to, 0, head, k_dim, dtype);
            } else {
                memcpy(to, static_cast<const char*>(k) + from * bytes, static_cast<size_t>(k_dim * bytes));
            }
            memcpy(slot_of(v_pages, slots[m], h, page_size, dtype),
                   static_cast<const char*>(v) + (m * v_token + h * v_head) * bytes,
                   static_cast<size_t>(v_dim * bytes));
        }
    });
}

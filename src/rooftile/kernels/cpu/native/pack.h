// Weights into tiles, and back row by row.

inline void column_of(const Weight& w, int64_t row, int64_t column, float value) {
    int64_t padded = groups_of(w) * GROUP, tile = row / TILE, lane = row % TILE;
    if (w.format == TILED_FLOAT32) {
        auto data = static_cast<float*>(const_cast<void*>(w.data));
        data[(tile * padded + column) * TILE + lane] = value;
    } else {
        auto data = static_cast<bf16*>(const_cast<void*>(w.data));
        narrow(value, data[((tile * (padded / 2) + column / 2) * TILE + lane) * 2 + column % 2]);
    }
}

// A byte or nibble of a quantised weight, and the scales of a group.
inline void put_code(const Weight& w, int64_t row, int64_t column, int code) {
    int64_t groups = groups_of(w), tile = row / TILE, lane = row % TILE;
    auto data = static_cast<uint8_t*>(const_cast<void*>(w.data));
    if (w.format != INT4) {
        data[((tile * groups * 8 + column / 4) * TILE + lane) * 4 + column % 4] =
            static_cast<uint8_t>(code);
        return;
    }
    int64_t j = column % 8;
    uint8_t& both = data[((tile * groups * 4 + column / 8) * TILE + lane) * 4 + j % 4];
    both = j < 4 ? static_cast<uint8_t>((both & 0xf0) | code)
                 : static_cast<uint8_t>((both & 0x0f) | code << 4);
}
inline void put_scales(const Weight& w, int64_t row, int64_t group, half scale, half minimum) {
    int64_t groups = groups_of(w), tile = row / TILE, lane = row % TILE;
    auto scales = static_cast<half*>(const_cast<void*>(w.scales));
    if (w.format == INT4) {
        scales[((tile * groups + group) * 2) * TILE + lane] = scale;
        scales[((tile * groups + group) * 2 + 1) * TILE + lane] = minimum;
    } else {
        scales[(tile * groups + group) * TILE + lane] = scale;
    }
}

inline half to_half(float x) {
    half h;
    narrow(x, h);
    return h;
}

// Scale, minimum and codes 0..15 of a group of 32 with the least sum of squared errors found: for
// some widths of the range, codes by rounding, then scale and minimum by least squares.
inline void quantise_int4(const float* x, half& scale, half& minimum, uint8_t* codes) {
    F a = load(x), b = load(x + 16), none = set1(0.0f), most_code = set1(15.0f);
    float low = -largest(max(none - a, none - b)), high = largest(max(a, b));
    float total = sum(a + b), best = INFINITY, best_scale = 0, best_low = low;
    constexpr float WIDTHS[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f, 0.8f, 0.75f};
    for (float width : WIDTHS) {
        float middle = (low + high) / 2, half_range = (high - low) / 2 * width;
        float s = 2 * half_range / 15, m = middle - half_range;
        if (!(s > 0)) break;
        for (int round = 0; round < 2; ++round) {
            F inverse = set1(1 / s), offset = set1(m);
            F qa = min(most_code, max(none, nearest((a - offset) * inverse)));
            F qb = min(most_code, max(none, nearest((b - offset) * inverse)));
            float q = sum(qa + qb), qq = sum(qa * qa + qb * qb), qx = sum(qa * a + qb * b);
            float spread = 32 * qq - q * q;
            if (spread > 0) {
                s = (32 * qx - q * total) / spread;
                m = (total - s * q) / 32;
            }
            if (!(s > 0)) break;
            F ea = fma(qa, set1(s), set1(m)) - a, eb = fma(qb, set1(s), set1(m)) - b;
            float error = sum(ea * ea + eb * eb);
            if (error < best) {
                best = error;
                best_scale = s;
                best_low = m;
            }
        }
    }
    scale = to_half(best_scale);
    minimum = to_half(best_low);
    float s = widen(scale), m = widen(minimum), inverse = s > 0 ? 1 / s : 0;
    for (int i = 0; i < GROUP; ++i) {
        float code = std::nearbyint((x[i] - m) * inverse);
        codes[i] = static_cast<uint8_t>(code < 0 ? 0 : code > 15 ? 15 : code);
    }
}

inline void quantise_row(const float* x, const Weight& w, int64_t row) {
    int64_t groups = groups_of(w);
    if (w.format == INT4) {
        for (int64_t g = 0; g < groups; ++g) {
            half scale, minimum;
            uint8_t codes[GROUP];
            quantise_int4(x + g * GROUP, scale, minimum, codes);
            put_scales(w, row, g, scale, minimum);
            for (int i = 0; i < GROUP; ++i) put_code(w, row, g * GROUP + i, codes[i]);
        }
        return;
    }
    int64_t span = w.format == INT8 ? groups : 1;  // groups that share a scale
    for (int64_t g = 0; g < groups; g += span) {
        F most = zero();
        for (int64_t i = 0; i < span * GROUP; i += 16) most = max(most, abs(load(x + g * GROUP + i)));
        float scale = largest(most) / 127;
        if (w.format == INT8) {
            static_cast<float*>(const_cast<void*>(w.scales))[row] = scale;
        } else {
            half rounded = to_half(scale);
            put_scales(w, row, g, rounded, half{0});
            scale = widen(rounded);
        }
        float inverse = scale > 0 ? 1 / scale : 0;
        for (int64_t i = 0; i < span * GROUP; ++i) {
            float code = std::nearbyint(x[g * GROUP + i] * inverse);
            code = code < -127 ? -127 : code > 127 ? 127 : code;
            put_code(w, row, g * GROUP + i, static_cast<int>(code) + 128);
        }
    }
}

// Rows [first_row, first_row + rows) of w from x, in chunks of whole tiles: lanes share bytes.
void pack(const void* x, int32_t dtype, int64_t row_stride, const Weight& w, int64_t first_row,
          int64_t rows, int threads) {
    int64_t first_tile = first_row / TILE, end = first_row + rows, tiles = up(end, TILE) / TILE;
    int64_t padded = groups_of(w) * GROUP;
    parallel(threads, tiles - first_tile, [&](int64_t chunk) {
        float* row = scratch(padded);
        int64_t from = (first_tile + chunk) * TILE, to = from + TILE < end ? from + TILE : end;
        for (int64_t r = from < first_row ? first_row : from; r < to; ++r) {
            for (int64_t i = w.columns; i < padded; ++i) row[i] = 0;
            get(row, x, (r - first_row) * row_stride, w.columns, dtype);
            if (is_quantised(w.format)) {
                // A padding column takes the row's last value, so that it widens no range.
                for (int64_t i = w.columns; i < padded; ++i) row[i] = row[w.columns - 1];
                quantise_row(row, w, r);
            } else {
                for (int64_t i = 0; i < padded; ++i) column_of(w, r, i, row[i]);
            }
        }
    });
}

// One row of w in float32.
inline void unpack_row(const Weight& w, int64_t row, float* out) {
    int64_t padded = groups_of(w) * GROUP, groups = groups_of(w), tile = row / TILE, lane = row % TILE;
    auto bytes = static_cast<const uint8_t*>(w.data);
    auto scales = static_cast<const half*>(w.scales);
    for (int64_t c = 0; c < w.columns; ++c) {
        int64_t g = c / GROUP;
        if (w.format == TILED_FLOAT32) {
            out[c] = static_cast<const float*>(w.data)[(tile * padded + c) * TILE + lane];
        } else if (w.format == TILED_BFLOAT16) {
            out[c] = widen(static_cast<const bf16*>(
                w.data)[((tile * (padded / 2) + c / 2) * TILE + lane) * 2 + c % 2]);
        } else if (w.format == INT4) {
            int64_t j = c % 8;
            uint8_t both = bytes[((tile * groups * 4 + c / 8) * TILE + lane) * 4 + j % 4];
            const half* s = scales + (tile * groups + g) * 2 * TILE + lane;
            out[c] = static_cast<float>(j < 4 ? both & 15 : both >> 4) * widen(s[0]) + widen(s[TILE]);
        } else {
            float code = static_cast<float>(bytes[((tile * groups * 8 + c / 4) * TILE + lane) * 4 + c % 4]) - 128;
            out[c] = code * (w.format == INT8 ? static_cast<const float*>(w.scales)[row]
                                              : widen(scales[(tile * groups + g) * TILE + lane]));
        }
    }
}

void embed(const Weight& w, const int64_t* ids, int64_t tokens, float* out) {
    for (int64_t m = 0; m < tokens; ++m) unpack_row(w, ids[m], out + m * w.columns);
}

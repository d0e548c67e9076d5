// Weights from the quantised blocks of a GGUF file, taken over as they are.
#include "common.h"
#include "pool.h"

namespace rooftile {
namespace {

enum Kind : int32_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };

half load_half(const uint8_t* p) { return half{static_cast<uint16_t>(p[0] | p[1] << 8)}; }

void put_row(int32_t kind, const uint8_t* from, const Weight& w, int64_t row) {
    int64_t groups = groups_of(w), tile = row / TILE, lane = row % TILE;
    auto data = static_cast<uint8_t*>(const_cast<void*>(w.data));
    auto scales = static_cast<half*>(const_cast<void*>(w.scales));
    for (int64_t g = 0; g < groups; ++g) {
        half scale = load_half(from);
        if (kind == Q8_0) {
            scales[(tile * groups + g) * TILE + lane] = scale;
            for (int i = 0; i < GROUP; ++i)
                data[((tile * groups + g) * 8 + i / 4) * TILE * 4 + lane * 4 + i % 4] =
                    static_cast<uint8_t>(from[2 + i] + 128);
            from += 2 + GROUP;
            continue;
        }
        half minimum;
        if (kind == Q4_0) narrow(-8 * widen(scale), minimum);
        else minimum = load_half(from + 2);
        from += kind == Q4_0 ? 2 : 4;
        scales[(tile * groups + g) * 2 * TILE + lane] = scale;
        scales[(tile * groups + g) * 2 * TILE + TILE + lane] = minimum;
        // Byte i of a block holds columns i and i + 16; byte j of our step s columns 8 s + j and
        // 8 s + 4 + j.
        for (int s = 0; s < 4; ++s)
            for (int j = 0; j < 4; ++j) {
                int low = 8 * s + j, high = low + 4;
                int a = low < 16 ? from[low] & 15 : from[low - 16] >> 4;
                int b = high < 16 ? from[high] & 15 : from[high - 16] >> 4;
                data[((tile * groups + g) * 4 + s) * TILE * 4 + lane * 4 + j] =
                    static_cast<uint8_t>(a | b << 4);
            }
        from += 16;
    }
}

}  // namespace
}  // namespace rooftile

using namespace rooftile;

// Rows of blocks of one kind into rows [first_row, first_row + rows) of w; source row order[i] (or i,
// where order is null) becomes row first_row + i.
extern "C" __attribute__((visibility("default"))) void rooftile_pack_blocks(
    int32_t kind, const uint8_t* blocks, int64_t row_bytes, const int64_t* order, const Weight* w,
    int64_t first_row, int64_t rows, int32_t threads) {
    int64_t chunks = (rows + 63) / 64;
    parallel(threads, chunks, [&](int64_t chunk) {
        for (int64_t i = chunk * 64; i < rows && i < chunk * 64 + 64; ++i)
            put_row(kind, blocks + (order ? order[i] : i) * row_bytes, *w, first_row + i);
    });
}

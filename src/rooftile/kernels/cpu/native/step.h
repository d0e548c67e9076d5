// All layers of a decoder in one call, with the residual stream in float32.

// Tokens that go through the feed-forward layer together: bounds its memory.
constexpr int64_t FEED_FORWARD_TOKENS = 576;

template <class Finish>
inline void multiply_gated(const Weight& w, const Tokens& t, int64_t tokens, int32_t activation,
                           int threads, Finish&& finish) {
    int64_t half_tiles = tiles_of(w) / 2, each = chunk_tiles(half_tiles, tokens, threads);
    int64_t row_chunks = (half_tiles + each - 1) / each, passes = (tokens + PASS - 1) / PASS;
    parallel(threads, row_chunks * passes, [&](int64_t chunk) {
        int64_t first = place_of(chunk % row_chunks, row_chunks, threads) * each;
        int64_t last = first + each < half_tiles ? first + each : half_tiles;
        int64_t begin = chunk / row_chunks * PASS, end = begin + PASS < tokens ? begin + PASS : tokens;
        alignas(64) float gate[MOST_TOKENS * BLOCK_ROW], value[MOST_TOKENS * BLOCK_ROW];
        for (int64_t tile = first; tile < last; tile += TILES_AT_ONCE) {
            int n = tile + TILES_AT_ONCE <= last ? TILES_AT_ONCE : 1;
            for (int64_t m = begin; m < end;) {
                int count = is_quantised(w.format) ? tokens_at_once_int(end - m) : tokens_at_once(end - m);
                block(w, tile, n, t, m, count, m == begin, gate);
                block(w, half_tiles + tile, n, t, m, count, m == begin, value);
                for (int i = 0; i < count; ++i) {
                    float* row = gate + i * BLOCK_ROW;
                    for (int j = 0; j < n * TILE; j += TILE)
                        store(row + j, activate(load(row + j), activation) * load(value + i * BLOCK_ROW + j));
                    finish(m + i, tile * TILE, n * TILE, row);
                }
                m += count;
            }
        }
    });
}

// stream += scale * norm(branch), where there is a norm; branch is overwritten.
inline void add_branch(float* stream, float* branch, const float* norm, float eps, float scale, int64_t n) {
    if (norm) normalise(branch, norm, eps, n, branch);
    F s = set1(scale);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(stream + i, fma(load(branch + i), s, load(stream + i)));
    for (; i < n; ++i) stream[i] += scale * branch[i];
}

void step(const Decoder& d, const Step& s, int threads) {
    int64_t tokens = s.tokens, hidden = d.hidden, widest_qkv = 0, widest_out = 0, widest_inner = 0;
    int64_t prepared = 0, most_inner = tokens < FEED_FORWARD_TOKENS ? tokens : FEED_FORWARD_TOKENS;
    auto at_least = [](int64_t& x, int64_t y) { x = x > y ? x : y; };
    for (int64_t i = 0; i < d.num_layers; ++i) {
        const Layer& l = d.layers[i];
        at_least(widest_qkv, l.qkv.rows);
        at_least(widest_out, l.out.columns);
        at_least(widest_inner, l.down.columns);
        at_least(prepared, tokens_bytes(tokens, hidden, l.qkv.format));
        at_least(prepared, tokens_bytes(tokens, l.out.columns, l.out.format));
        at_least(prepared, tokens_bytes(most_inner, hidden, l.gate_up.format));
        at_least(prepared, tokens_bytes(most_inner, l.down.columns, l.down.format));
    }
    int64_t floats = tokens * (2 * hidden + widest_qkv + widest_out) + most_inner * widest_inner;
    Memory memory(up(prepared, 64) + floats * 4 + 5 * 64);
    char* at = memory.data + up(prepared, 64);
    auto take = [&](int64_t count) {
        auto here = reinterpret_cast<float*>(at);
        at += up(count * 4, 64);
        return here;
    };
    float* stream = take(tokens * hidden);
    float* branch = take(tokens * hidden);
    float* qkv = take(tokens * widest_qkv);
    float* attended = take(tokens * widest_out);
    float* inner = take(most_inner * widest_inner);

    each_token(tokens, hidden, threads, [&](int64_t m) {
        float* row = stream + m * hidden;
        if (d.embedding_rows)
            get(row, d.embedding_rows, s.token_ids[m] * hidden, hidden, d.embedding_dtype);
        else
            unpack_row(d.embedding, s.token_ids[m], row);
        if (d.embedding_scale != 1)
            for (int64_t i = 0; i < hidden; ++i) row[i] *= d.embedding_scale;
    });

    for (int64_t i = 0; i < d.num_layers; ++i) {
        const Layer& l = d.layers[i];
        const KvGroup& group = s.groups[l.group];
        int64_t dim = l.head_dim, q_heads = l.num_q_heads, kv_heads = l.num_kv_heads;
        int64_t width = l.qkv.rows;
        const float* post_norm = i ? d.layers[i - 1].mlp_post_norm : nullptr;

        Tokens t = place_tokens(memory.data, tokens, hidden, l.qkv.format);
        each_token(tokens, 4 * hidden, threads, [&](int64_t m) {
            float* row = scratch(hidden);
            float* mine = stream + m * hidden;
            if (i) add_branch(mine, branch + m * hidden, post_norm, d.eps, d.residual_scale, hidden);
            normalise(mine, l.attention_norm, d.eps, hidden, row);
            prepare(row, hidden, l.qkv.format, t, m);
        });
        multiply(l.qkv, t, tokens, threads, [&](int64_t m, int64_t first, int rows, const float* x) {
            put(qkv + m * width + first, x, rows);
        });
        each_token(tokens, 4 * width, threads, [&](int64_t m) {
            float* row = qkv + m * width;
            const float* angles = l.cos_sin ? l.cos_sin + s.positions[m] * 2 * l.rotary_half : nullptr;
            for (int64_t h = 0; h < q_heads + kv_heads; ++h) {
                float* head = row + h * dim;
                const float* norm = h < q_heads ? l.q_norm : l.k_norm;
                if (norm) normalise(head, norm, d.eps, dim, head);
                if (angles) rotate(head, angles, l.rotary_half, false, 1.0f);
            }
            int64_t slot = group.slots[m];
            if (slot < 0) return;
            for (int64_t h = 0; h < kv_heads; ++h) {
                float* k = row + (q_heads + h) * dim;
                put(slot_of(l.k, slot, h, group.page_size, d.dtype), 0, k, dim, d.dtype);
                put(slot_of(l.v, slot, h, group.page_size, d.dtype), 0, k + kv_heads * dim, dim, d.dtype);
            }
        });
        Attention a{};
        a.q = qkv;
        a.q_token = width;
        a.q_head = dim;
        a.k = l.k;
        a.v = l.v;
        a.cu_seqlens_q = s.cu_seqlens_q;
        a.kv_lens = s.kv_lens;
        a.page_table = group.page_table;
        a.table_row = group.table_row;
        a.out = attended;
        a.batch = s.batch;
        a.tokens = tokens;
        a.num_q_heads = l.num_q_heads;
        a.num_kv_heads = l.num_kv_heads;
        a.k_dim = a.v_dim = l.head_dim;
        a.page_size = group.page_size;
        a.left = l.left;
        a.right = 0;
        a.softcap = l.softcap;
        a.scale = l.scale;
        a.q_dtype = a.out_dtype = FLOAT32;
        a.dtype = d.dtype;
        attention(a, threads);

        int64_t columns = l.out.columns;
        t = place_tokens(memory.data, tokens, columns, l.out.format);
        each_token(tokens, 2 * columns, threads, [&](int64_t m) {
            prepare(attended + m * columns, columns, l.out.format, t, m);
        });
        multiply(l.out, t, tokens, threads, [&](int64_t m, int64_t first, int rows, const float* x) {
            put(branch + m * hidden + first, x, rows);
        });

        for (int64_t begin = 0; begin < tokens; begin += most_inner) {
            int64_t count = tokens - begin < most_inner ? tokens - begin : most_inner;
            t = place_tokens(memory.data, count, hidden, l.gate_up.format);
            each_token(count, 4 * hidden, threads, [&](int64_t m) {
                float* row = scratch(hidden);
                float* mine = stream + (begin + m) * hidden;
                add_branch(mine, branch + (begin + m) * hidden, l.attention_post_norm, d.eps,
                           d.residual_scale, hidden);
                normalise(mine, l.mlp_norm, d.eps, hidden, row);
                prepare(row, hidden, l.gate_up.format, t, m);
            });
            columns = l.down.columns;
            multiply_gated(l.gate_up, t, count, l.activation, threads,
                           [&](int64_t m, int64_t first, int rows, const float* x) {
                               put(inner + m * columns + first, x, rows);
                           });
            t = place_tokens(memory.data, count, columns, l.down.format);
            each_token(count, 2 * columns, threads, [&](int64_t m) {
                prepare(inner + m * columns, columns, l.down.format, t, m);
            });
            multiply(l.down, t, count, threads, [&](int64_t m, int64_t first, int rows, const float* x) {
                put(branch + (begin + m) * hidden + first, x, rows);
            });
        }
    }
    const float* post_norm = d.layers[d.num_layers - 1].mlp_post_norm;
    each_token(tokens, 4 * hidden, threads, [&](int64_t m) {
        float* mine = stream + m * hidden;
        add_branch(mine, branch + m * hidden, post_norm, d.eps, d.residual_scale, hidden);
        normalise(mine, d.norm, d.eps, hidden, mine);
        put(s.out, m * hidden, mine, hidden, d.dtype);
    });
}

// A hot thread pool: threads spin briefly for the next job, then sleep.
//
// A job is a number of chunks that threads claim one by one, so a thread that the system has
// suspended delays only the chunk it holds, and a busy machine slows a job down without stalling it.
#pragma once

#include <cstdint>

namespace rooftile {

// Runs f(context, chunk) for every chunk in [0, chunks) on up to `threads` threads, this one among
// them, and returns when all are done. While another thread's job runs, or from within a job, all
// chunks run here.
void run_chunks(int threads, int64_t chunks, void (*f)(void*, int64_t), void* context);

template <class Function>
void parallel(int threads, int64_t chunks, Function&& function) {
    if (chunks <= 0) return;
    if (threads <= 1 || chunks == 1) {
        for (int64_t i = 0; i < chunks; ++i) function(i);
        return;
    }
    run_chunks(
        threads, chunks,
        [](void* context, int64_t chunk) { (*static_cast<Function*>(context))(chunk); }, &function);
}

}  // namespace rooftile

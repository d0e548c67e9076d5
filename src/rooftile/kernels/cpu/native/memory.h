// Memory of one call, kept by its thread for the next ones.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rooftile {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr int64_t KEPT = 64 << 20;  // more than this goes back after the call

struct Buffer {
    char* data = nullptr;
    int64_t size = 0;
    ~Buffer() { free(data); }
    char* at_least(int64_t bytes) {
        if (bytes <= size) return data;
        free(data);
        int64_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;
        size = (bytes + unit - 1) / unit * unit;
        data = static_cast<char*>(aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(size)));
        if (data == nullptr) {
            size = 0;
            throw std::bad_alloc();
        }
#if defined(__linux__)
        if (size >= HUGE_PAGE) madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
        return data;
    }
};

// Nested: each further one of a thread has a buffer of its own.
class Memory {
  public:
    char* data;
    explicit Memory(int64_t bytes) : buffer(buffers()[depth()]) {
        data = buffer.at_least(bytes);
        ++depth();
    }
    ~Memory() {
        --depth();
        if (buffer.size > KEPT) {
            free(buffer.data);
            buffer.data = nullptr;
            buffer.size = 0;
        }
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

  private:
    Buffer& buffer;
    static Buffer* buffers() {
        static thread_local Buffer all[8];
        return all;
    }
    static int& depth() {
        static thread_local int now = 0;
        return now;
    }
};

// Rows of floats that nobody needs when the next function asks for some.
inline float* scratch(int64_t floats) {
    static thread_local Buffer buffer;
    return reinterpret_cast<float*>(buffer.at_least(floats * 4 + 64));
}

}  // namespace rooftile

#pragma once

#include <cstddef>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The two loops that every limit is made of, as plainly as they can be written: no types, no
// operations, no unaligned buffers.
namespace limit {

constexpr std::size_t kGrain = 256;  // buffers are aligned to, and lengths multiples of it

enum class Stores { kPlain, kStreaming };

#if defined(__x86_64__)
// to = a + b and, where `also` is given, also = to.
template <Stores stores>
__attribute__((target("avx2"))) inline void add_avx2(float* to, const float* a, const float* b,
                                                     float* also, std::size_t bytes) {
  const std::size_t count = bytes / sizeof(float);
  for (std::size_t i = 0; i < count; i += 64) {
    __m256 sum[8];
    for (int u = 0; u < 8; ++u) {
      sum[u] = _mm256_add_ps(_mm256_load_ps(a + i + 8 * u), _mm256_load_ps(b + i + 8 * u));
    }
    for (float* target : {to, also}) {
      if (target == nullptr) continue;
      for (int u = 0; u < 8; ++u) {
        if constexpr (stores == Stores::kStreaming) {
          _mm256_stream_ps(target + i + 8 * u, sum[u]);
        } else {
          _mm256_store_ps(target + i + 8 * u, sum[u]);
        }
      }
    }
  }
  if constexpr (stores == Stores::kStreaming) _mm_sfence();
}

__attribute__((target("avx2"))) inline void copy_streaming_avx2(float* to, const float* from,
                                                                std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / sizeof(float); i += 16) {
    const __m256 low = _mm256_load_ps(from + i), high = _mm256_load_ps(from + i + 8);
    _mm256_stream_ps(to + i, low);
    _mm256_stream_ps(to + i + 8, high);
  }
  _mm_sfence();
}

inline const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
#else
inline const bool kHasAvx2 = false;
#endif

inline void add_portable(float* to, const float* a, const float* b, float* also,
                         std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / sizeof(float); ++i) to[i] = a[i] + b[i];
  if (also != nullptr) std::memcpy(also, to, bytes);
}

// to = a + b, and also = to where it is given.
inline void add(void* to, const void* a, const void* b, void* also, std::size_t bytes,
                Stores stores) {
  auto* sum = static_cast<float*>(to);
  auto* x = static_cast<const float*>(a);
  auto* y = static_cast<const float*>(b);
  auto* z = static_cast<float*>(also);
#if defined(__x86_64__)
  if (kHasAvx2) {
    return stores == Stores::kStreaming ? add_avx2<Stores::kStreaming>(sum, x, y, z, bytes)
                                        : add_avx2<Stores::kPlain>(sum, x, y, z, bytes);
  }
#endif
  static_cast<void>(stores);
  add_portable(sum, x, y, z, bytes);
}

inline void copy(void* to, const void* from, std::size_t bytes, Stores stores) {
#if defined(__x86_64__)
  if (kHasAvx2 && stores == Stores::kStreaming) {
    copy_streaming_avx2(static_cast<float*>(to), static_cast<const float*>(from), bytes);
    return;
  }
#endif
  static_cast<void>(stores);
  std::memcpy(to, from, bytes);
}

}  // namespace limit

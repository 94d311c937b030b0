// The SHA extensions of x86-64, compiled for those functions alone (the rest of the build stays generic) and used only where
// CPUID reports them. Other processors use the portable code.
#include "support/sha256.h"
#include "support/sha256_rounds.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#include <immintrin.h>

namespace tokenspeed {
namespace {

// The instructions keep the eight words as two vectors, (a, b, e, f) and (c, d, g, h) from the highest lane down; four rounds are
// two `rnds2`, and `msg1`/`msg2` make the next four words of the schedule from the last sixteen.
__attribute__((target("sha,sse4.1,ssse3"))) void CompressX86(uint32_t state[8], const uint8_t* data, size_t blocks) {
  const __m128i byte_order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);

  for (; blocks != 0; --blocks, data += 64) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    __m128i words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), byte_order);
    }
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      __m128i& current = words[group & 3];
      if (group >= 4) {
        const __m128i next1 = words[(group + 1) & 3];
        const __m128i next2 = words[(group + 2) & 3];
        const __m128i last = words[(group + 3) & 3];
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(current, next1), _mm_alignr_epi8(last, next2, 4));
        current = _mm_sha256msg2_epu32(sum, last);
      }
      __m128i keyed = _mm_add_epi32(current, _mm_load_si128(reinterpret_cast<const __m128i*>(kSha256Rounds) + group));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
      keyed = _mm_shuffle_epi32(keyed, 0x0E);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, keyed);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

bool ProcessorHasSha() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  const bool sse = (c & (1u << 9)) != 0 && (c & (1u << 19)) != 0;  // SSSE3, SSE4.1
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return sse && (b & (1u << 29)) != 0;
}

}  // namespace

Sha256::Compress Sha256::Accelerated() noexcept {
  static const bool has_sha = ProcessorHasSha();
  return has_sha ? &CompressX86 : nullptr;
}

}  // namespace tokenspeed
#else
namespace tokenspeed {
Sha256::Compress Sha256::Accelerated() noexcept { return nullptr; }
}  // namespace tokenspeed
#endif

// 8-lane vectors on AVX2 with FMA. Included inside an instruction set's own namespace.
#pragma once

using V = __m256;
constexpr int W = 8;
constexpr int kGemmNR = 4;
constexpr int kGemmMR = 3;  // 12 accumulators, 3 inputs, 1 weight: all 16 registers
constexpr int kGemmMRBf16 = 2;
constexpr int kTileNV = 2;  // attention tiles: 6 x 16
constexpr int kTileMR = 6;

SIMD_INLINE __m256i lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// Holds a value in its register: the compiler would rather repeat its load as a memory operand of every use.
SIMD_INLINE void keep(V& a) { asm("" : "+x"(a)); }

SIMD_INLINE V zero() { return _mm256_setzero_ps(); }
SIMD_INLINE V set1(float x) { return _mm256_set1_ps(x); }
SIMD_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
SIMD_INLINE V load_n(const float* p, int n) { return _mm256_maskload_ps(p, lanes(n)); }
SIMD_INLINE void store(float* p, V a) { _mm256_storeu_ps(p, a); }
SIMD_INLINE void store_n(float* p, V a, int n) { _mm256_maskstore_ps(p, lanes(n), a); }

SIMD_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
SIMD_INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
SIMD_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
SIMD_INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
SIMD_INLINE V vmax(V a, V b) { return _mm256_max_ps(a, b); }
SIMD_INLINE V vmin(V a, V b) { return _mm256_min_ps(a, b); }
SIMD_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
SIMD_INLINE V round_nearest(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SIMD_INLINE V scale_by_pow2(V a, V n) {  // two halves, so that 2^n may itself be out of range
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return mul(mul(a, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
SIMD_INLINE V zero_below(V x, V bound, V a) { return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_NLT_UQ), a); }
SIMD_INLINE float hsum(V a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
SIMD_INLINE float hmax(V a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

SIMD_INLINE V load(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
SIMD_INLINE V load_n(const uint16_t* p, int n) {
  alignas(16) uint16_t t[8] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
SIMD_INLINE void store(uint16_t* p, V a) {  // round to nearest even; NaN stays NaN
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
SIMD_INLINE void store_n(uint16_t* p, V a, int n) {
  alignas(16) uint16_t t[8];
  store(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

struct NanFlag {
  V seen = _mm256_setzero_ps();
  SIMD_INLINE void check(V a) { seen = _mm256_or_ps(seen, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
  SIMD_INLINE bool any() const { return _mm256_movemask_ps(seen) != 0; }
};

// out[i] = sum of the lanes of a[i], every i by the same tree.
SIMD_INLINE void hsum_tile(const V (&a)[4], float* out) {
  const V s = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

SIMD_INLINE void transpose(V (&r)[8]) {
  V t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
    }
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// Operands of the bf16 dot product: 16 values a step.
struct PairBf16 {
  V even, odd;
};
SIMD_INLINE void keep(PairBf16&) {}
SIMD_INLINE PairBf16 load_pair(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
SIMD_INLINE PairBf16 load_pair_n(const uint16_t* p, int n) {
  alignas(32) uint16_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load_pair(t);
}
SIMD_INLINE V mac(PairBf16 a, PairBf16 b, V c) { return fma(a.odd, b.odd, fma(a.even, b.even, c)); }

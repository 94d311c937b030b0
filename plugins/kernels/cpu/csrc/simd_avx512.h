// 16-lane vectors on AVX-512 (F, BW, DQ, VL). Included inside an instruction set's own namespace.
#pragma once

using V = __m512;
constexpr int W = 16;
constexpr int kGemmNR = 8;
constexpr int kGemmMR = 3;  // 24 accumulators, 3 inputs, 1 weight
constexpr int kGemmMRBf16 = 2;
constexpr int kTileNV = 4;  // attention tiles: 6 x 64
constexpr int kTileMR = 6;

SIMD_INLINE __mmask16 lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

// Holds a value in its register: the compiler would rather repeat its load as a memory operand of every use.
SIMD_INLINE void keep(V& a) { asm("" : "+v"(a)); }

SIMD_INLINE V zero() { return _mm512_setzero_ps(); }
SIMD_INLINE V set1(float x) { return _mm512_set1_ps(x); }
SIMD_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
SIMD_INLINE V load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
SIMD_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a); }
SIMD_INLINE void store_n(float* p, V a, int n) { _mm512_mask_storeu_ps(p, lanes(n), a); }

SIMD_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
SIMD_INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
SIMD_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
SIMD_INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
SIMD_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
SIMD_INLINE V vmin(V a, V b) { return _mm512_min_ps(a, b); }
SIMD_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
SIMD_INLINE V round_nearest(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
SIMD_INLINE V scale_by_pow2(V a, V n) { return _mm512_scalef_ps(a, n); }
// x < bound ? 0 : a
SIMD_INLINE V zero_below(V x, V bound, V a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a);
}
SIMD_INLINE float hsum(V a) { return _mm512_reduce_add_ps(a); }
SIMD_INLINE float hmax(V a) { return _mm512_reduce_max_ps(a); }

SIMD_INLINE V load(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
SIMD_INLINE V load_n(const uint16_t* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes(n), p)), 16));
}
SIMD_INLINE __m256i to_bf16(V a) {  // round to nearest even; NaN stays NaN
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
SIMD_INLINE void store(uint16_t* p, V a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a)); }
SIMD_INLINE void store_n(uint16_t* p, V a, int n) { _mm256_mask_storeu_epi16(p, lanes(n), to_bf16(a)); }

struct NanFlag {
  __mmask16 seen = 0;
  SIMD_INLINE void check(V a) { seen |= _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  SIMD_INLINE bool any() const { return seen != 0; }
};

// out[i] = sum of the lanes of a[i], every i by the same tree.
SIMD_INLINE void hsum_tile(const V (&a)[8], float* out) {
  V p[4];
  for (int j = 0; j < 4; ++j) {  // fold 256-bit halves of a pair into one vector: [a_j | a_(j+4)]
    p[j] = add(_mm512_mask_blend_ps(0xff00, a[j], a[j + 4]), _mm512_shuffle_f32x4(a[j], a[j + 4], 0x4e));
  }
  const V v0 = add(_mm512_shuffle_f32x4(p[0], p[2], 0x88), _mm512_shuffle_f32x4(p[0], p[2], 0xdd));  // a0 a4 a2 a6
  const V v1 = add(_mm512_shuffle_f32x4(p[1], p[3], 0x88), _mm512_shuffle_f32x4(p[1], p[3], 0xdd));  // a1 a5 a3 a7
  const V s = add(_mm512_unpacklo_ps(v0, v1), _mm512_unpackhi_ps(v0, v1));
  const V t = add(s, _mm512_permute_ps(s, 0x4e));
  const __m512i order = _mm512_setr_epi64(0, 4, 2, 6, 0, 4, 2, 6);
  _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_castpd_ps(_mm512_permutexvar_pd(order, _mm512_castps_pd(t)))));
}

SIMD_INLINE void transpose(V (&r)[16]) {
  V t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d lo = _mm512_castps_pd(t[i + j]), hi = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
    }
  }
  for (int i = 0; i < 4; ++i) {  // r[4g + i] holds column 4 * lane + i of rows 4g .. 4g + 3
    const V a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    const V c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    t[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Operands of the bf16 dot product: 32 values a step.
#if defined(__AVX512BF16__)
struct PairBf16 {
  __m512bh v;
};
SIMD_INLINE void keep(PairBf16& a) { asm("" : "+v"(a.v)); }
SIMD_INLINE PairBf16 load_pair(const uint16_t* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
SIMD_INLINE PairBf16 load_pair_n(const uint16_t* p, int n) {
  return {(__m512bh)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p)};
}
SIMD_INLINE V mac(PairBf16 a, PairBf16 b, V c) { return _mm512_dpbf16_ps(c, a.v, b.v); }
#else
struct PairBf16 {
  V even, odd;
};
SIMD_INLINE void keep(PairBf16&) {}
SIMD_INLINE PairBf16 split_pair(__m512i v) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
SIMD_INLINE PairBf16 load_pair(const uint16_t* p) { return split_pair(_mm512_loadu_si512(p)); }
SIMD_INLINE PairBf16 load_pair_n(const uint16_t* p, int n) {
  return split_pair(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p));
}
SIMD_INLINE V mac(PairBf16 a, PairBf16 b, V c) { return fma(a.odd, b.odd, fma(a.even, b.even, c)); }
#endif

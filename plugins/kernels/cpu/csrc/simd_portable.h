// 4-lane vectors through the compiler's vector extension: SSE2 on x86-64, NEON (with fused multiply-add) on arm64.
// Included inside an instruction set's own namespace.
#pragma once

typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
constexpr int W = 4;
constexpr int kGemmNR = 4;
#if defined(__aarch64__)
constexpr int kGemmMR = 5;  // 32 registers: 20 accumulators, 5 inputs, 1 weight
constexpr int kGemmMRBf16 = 3;
constexpr int kTileNV = 4;
constexpr int kTileMR = 6;
#else
constexpr int kGemmMR = 2;
constexpr int kGemmMRBf16 = 2;
constexpr int kTileNV = 2;
constexpr int kTileMR = 4;
#endif

SIMD_INLINE void keep(V&) {}

SIMD_INLINE V zero() { return V{0, 0, 0, 0}; }
SIMD_INLINE V set1(float x) { return V{x, x, x, x}; }
SIMD_INLINE V load(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
SIMD_INLINE V load_n(const float* p, int n) {
  V v = zero();
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
SIMD_INLINE void store(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }
SIMD_INLINE void store_n(float* p, V a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a[i];
}

SIMD_INLINE V add(V a, V b) { return a + b; }
SIMD_INLINE V sub(V a, V b) { return a - b; }
SIMD_INLINE V mul(V a, V b) { return a * b; }
SIMD_INLINE V div(V a, V b) { return a / b; }
SIMD_INLINE V select(VI mask, V a, V b) { return (V)(((VI)a & mask) | ((VI)b & ~mask)); }
SIMD_INLINE V vmax(V a, V b) { return select((VI)(a > b), a, b); }
SIMD_INLINE V vmin(V a, V b) { return select((VI)(a < b), a, b); }
SIMD_INLINE V fma(V a, V b, V c) { return a * b + c; }
SIMD_INLINE V round_nearest(V a) {  // |a| < 2^22, as exp() makes sure
  const V magic = set1(12582912.0f);
  const V shifted = a + magic;
  return shifted - magic;
}
SIMD_INLINE V scale_by_pow2(V a, V n) {  // two halves, so that 2^n may itself be out of range
  const VI whole = __builtin_convertvector(n, VI);
  const VI half = whole >> 1;
  const VI first = (half + 127) << 23;
  const VI second = (whole - half + 127) << 23;
  return a * (V)first * (V)second;
}
SIMD_INLINE V zero_below(V x, V bound, V a) { return (V)((VI)a & ~(VI)(x < bound)); }
SIMD_INLINE float hsum(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
SIMD_INLINE float hmax(V a) {
  const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
  return x > y ? x : y;
}

SIMD_INLINE V load(const uint16_t* p) {
  const VU v = {p[0], p[1], p[2], p[3]};
  return (V)(v << 16);
}
SIMD_INLINE V load_n(const uint16_t* p, int n) {
  VU v = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return (V)(v << 16);
}
SIMD_INLINE VU to_bf16(V a) {  // round to nearest even; NaN stays NaN
  const VU bits = (VU)a;
  const VU rounded = bits + ((bits >> 16) & 1) + 0x7fff;
  const VU nan = (VU)(a != a);
  return ((rounded & ~nan) | ((bits | 0x400000) & nan)) >> 16;
}
SIMD_INLINE void store_n(uint16_t* p, V a, int n) {
  const VU v = to_bf16(a);
  for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(v[i]);
}
SIMD_INLINE void store(uint16_t* p, V a) { store_n(p, a, 4); }

struct NanFlag {
  VI seen = {0, 0, 0, 0};
  SIMD_INLINE void check(V a) { seen |= (VI)(a != a); }
  SIMD_INLINE bool any() const { return (seen[0] | seen[1] | seen[2] | seen[3]) != 0; }
};

SIMD_INLINE void transpose(V (&r)[4]) {
  const V a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const V c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// out[i] = sum of the lanes of a[i], every i by the same tree.
SIMD_INLINE void hsum_tile(const V (&a)[4], float* out) {
  V t[4] = {a[0], a[1], a[2], a[3]};
  transpose(t);
  store(out, (t[0] + t[2]) + (t[1] + t[3]));
}

// Operands of the bf16 dot product: 8 values a step.
struct PairBf16 {
  V even, odd;
};
SIMD_INLINE void keep(PairBf16&) {}
SIMD_INLINE PairBf16 load_pair(const uint16_t* p) {
  VU v;
  __builtin_memcpy(&v, p, sizeof v);
  return {(V)(v << 16), (V)(v & 0xffff0000u)};
}
SIMD_INLINE PairBf16 load_pair_n(const uint16_t* p, int n) {
  uint16_t t[8] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load_pair(t);
}
SIMD_INLINE V mac(PairBf16 a, PairBf16 b, V c) { return fma(a.odd, b.odd, fma(a.even, b.even, c)); }

// Matrix product with the weight as it lies in the checkpoint: out[m][n] = sum over k of x[m][k] * w[n][k].
//
// Both operands are contiguous along k, so a tile keeps MR x NR accumulators whose lanes run along k and folds the lanes at
// the end; nothing is packed or copied. Every output is computed by the same sequence of operations whatever the number of
// rows, its place in a tile or the thread: k is cut into equal blocks that depend on k alone, each block's lanes are summed
// by one tree, and the blocks are added in order. At few rows the product is bound by reading weights: those of the tile after
// the next are prefetched evenly through the current one, into the second-level cache (the first level is too small for the
// distance: that costs a third of the bandwidth).
#pragma once

template <class T>
struct Elem;

template <>
struct Elem<float> {
  using Reg = V;
  static constexpr int kStep = W;
  static constexpr int kMR = kGemmMR;
  static SIMD_INLINE Reg read(const float* p) { return load(p); }
  static SIMD_INLINE Reg read_n(const float* p, int n) { return load_n(p, n); }
  static SIMD_INLINE V mac(Reg a, Reg b, V c) { return fma(a, b, c); }
};

template <>
struct Elem<uint16_t> {
  using Reg = PairBf16;
  static constexpr int kStep = 2 * W;
#if defined(__AVX512BF16__)
  static constexpr int kMR = kGemmMR;
#else
  static constexpr int kMR = kGemmMRBf16;
#endif
  static SIMD_INLINE Reg read(const uint16_t* p) { return load_pair(p); }
  static SIMD_INLINE Reg read_n(const uint16_t* p, int n) { return load_pair_n(p, n); }
  static SIMD_INLINE V mac(Reg a, Reg b, V c) { return TS_ISA::mac(a, b, c); }
};

constexpr int64_t kMaxKBlock = 640;  // 8 weight rows and 3 input rows of it stay within a 32 KiB first-level cache

SIMD_INLINE int64_t k_block(int64_t k) {
  const int64_t blocks = (k + kMaxKBlock - 1) / kMaxKBlock;
  const int64_t each = (k + blocks - 1) / blocks;
  return (each + 63) / 64 * 64;
}

// MR input rows x NR weight rows over one k block; AHEAD weight rows at `next` are prefetched.
template <class T, int MR, int NR, int AHEAD>
void gemm_tile(const T* x, int64_t ldx, const T* w, int64_t ldw, int64_t k, float* c, int64_t ldc, bool accumulate,
               const T* next) {
  using E = Elem<T>;
  V acc[MR][kGemmNR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kGemmNR; ++n) acc[m][n] = zero();
  }
  int64_t i = 0;
  for (; i + E::kStep <= k; i += E::kStep) {
    typename E::Reg a[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) a[m] = E::read(x + m * ldx + i);
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) {
      typename E::Reg b = E::read(w + n * ldw + i);
      keep(b);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) acc[m][n] = E::mac(a[m], b, acc[m][n]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < AHEAD; ++r) __builtin_prefetch(next + r * ldw + i, 0, 2);
  }
  if (i < k) {
    const int rest = static_cast<int>(k - i);
    typename E::Reg a[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) a[m] = E::read_n(x + m * ldx + i, rest);
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) {
      const typename E::Reg b = E::read_n(w + n * ldw + i, rest);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) acc[m][n] = E::mac(a[m], b, acc[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    float sums[kGemmNR];
    hsum_tile(acc[m], sums);
    float* row = c + m * ldc;
    if (accumulate) {
      for (int n = 0; n < NR; ++n) row[n] += sums[n];
    } else {
      for (int n = 0; n < NR; ++n) row[n] = sums[n];
    }
  }
}

template <class T, int MR, int NR>
SIMD_INLINE void gemm_tile_ahead(const T* x, int64_t ldx, const T* w, int64_t ldw, int64_t k, float* c, int64_t ldc,
                                 bool accumulate, const T* next, int ahead) {
  if constexpr (NR == 1) {
    gemm_tile<T, MR, NR, 0>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
  } else {
    switch (ahead) {
      case 0: return gemm_tile<T, MR, NR, 0>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
      case 1: return gemm_tile<T, MR, NR, 1>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
      case 2: return gemm_tile<T, MR, NR, 2>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
      case 3: return gemm_tile<T, MR, NR, 3>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
      case 4: return gemm_tile<T, MR, NR, 4>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
      default: return gemm_tile<T, MR, NR, NR>(x, ldx, w, ldw, k, c, ldc, accumulate, next);
    }
  }
}

template <class T, int NR>
SIMD_INLINE void gemm_tile_rows(int rows, const T* x, int64_t ldx, const T* w, int64_t ldw, int64_t k, float* c, int64_t ldc,
                                bool accumulate, const T* next, int ahead) {
  static_assert(Elem<T>::kMR <= 5);
  switch (rows) {
    case 1: return gemm_tile_ahead<T, 1, NR>(x, ldx, w, ldw, k, c, ldc, accumulate, next, ahead);
    case 2: return gemm_tile_ahead<T, 2, NR>(x, ldx, w, ldw, k, c, ldc, accumulate, next, ahead);
    case 3:
      if constexpr (Elem<T>::kMR >= 3) gemm_tile_ahead<T, 3, NR>(x, ldx, w, ldw, k, c, ldc, accumulate, next, ahead);
      return;
    case 4:
      if constexpr (Elem<T>::kMR >= 4) gemm_tile_ahead<T, 4, NR>(x, ldx, w, ldw, k, c, ldc, accumulate, next, ahead);
      return;
    default:
      if constexpr (Elem<T>::kMR >= 5) gemm_tile_ahead<T, 5, NR>(x, ldx, w, ldw, k, c, ldc, accumulate, next, ahead);
      return;
  }
}

// rows x [n0, n1) of the product into c (row stride ldc, column 0 = n0).
template <class T>
void gemm_panel(const T* x, int64_t ldx, const T* w, int64_t k, int64_t rows, int64_t n0, int64_t n1, float* c, int64_t ldc) {
  const int64_t block = k_block(k);
  const int64_t tiles = (rows + Elem<T>::kMR - 1) / Elem<T>::kMR;
  const int64_t base = rows / tiles, longer = rows % tiles;
  // Each tile prefetches `ahead` of the later weight rows, so that all are under way by the last tile.
  const int ahead = static_cast<int>((kGemmNR + tiles - 1) / tiles);
  for (int64_t n = n0; n < n1;) {
    const int64_t width = n + kGemmNR <= n1 ? kGemmNR : 1;
    for (int64_t k0 = 0; k0 < k; k0 += block) {
      const int64_t depth = k0 + block < k ? block : k - k0;
      const T* tile_w = w + n * k + k0;
      const T* next = (k0 + block < k ? tile_w + block : w + (n + width) * k) + kGemmNR * k;  // one tile further
      int64_t m = 0;
      for (int64_t t = 0; t < tiles; ++t) {
        const int height = static_cast<int>(base + (t < longer ? 1 : 0));
        const T* tile_x = x + m * ldx + k0;
        float* tile_c = c + m * ldc + (n - n0);
        if (width == kGemmNR) {
          const int64_t row = t * ahead;
          gemm_tile_rows<T, kGemmNR>(height, tile_x, ldx, tile_w, k, depth, tile_c, ldc, k0 > 0, next + row * k,
                                     row < kGemmNR ? ahead : 0);
        } else {
          gemm_tile_rows<T, 1>(height, tile_x, ldx, tile_w, k, depth, tile_c, ldc, k0 > 0, next, 0);
        }
        m += height;
      }
    }
    n += width;
  }
}

template <class T>
void add_bias(float* c, int64_t ldc, int64_t rows, const T* bias, int64_t n) {
  for (int64_t m = 0; m < rows; ++m) {
    float* row = c + m * ldc;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(row + i, add(load(row + i), load(bias + i)));
    if (i < n) store_n(row + i, add(load_n(row + i, static_cast<int>(n - i)), load_n(bias + i, static_cast<int>(n - i))),
                       static_cast<int>(n - i));
  }
}

template <class To>
void copy_row(const float* from, To* to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_n(to + i, load_n(from + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

template <class To>
void silu_mul_to(const float* gate, const float* up, To* to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, silu_mul(load(gate + i), load(up + i)));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_n(to + i, silu_mul(load_n(gate + i, rest), load_n(up + i, rest)), rest);
  }
}

template <class T, class To>
void gemm_block_typed(const GemmArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* scratch) {
  const T* x = static_cast<const T*>(a.x) + m0 * a.ldx;
  const T* w = static_cast<const T*>(a.w);
  const T* bias = static_cast<const T*>(a.bias);
  To* out = static_cast<To*>(a.out) + m0 * a.ldo + n0;
  const int64_t rows = m1 - m0, width = n1 - n0;
  float* c = scratch;
  int64_t ldc = width;
  constexpr bool direct_type = sizeof(To) == sizeof(float);
  if (direct_type && !a.silu_mul) {
    c = reinterpret_cast<float*>(out);
    ldc = a.ldo;
  }
  gemm_panel<T>(x, a.ldx, w, a.k, rows, n0, n1, c, ldc);
  if (bias != nullptr) add_bias(c, ldc, rows, bias + n0, width);
  if (a.silu_mul) {
    float* up = scratch + rows * width;
    gemm_panel<T>(x, a.ldx, w, a.k, rows, a.n + n0, a.n + n1, up, width);
    if (bias != nullptr) add_bias(up, width, rows, bias + a.n + n0, width);
    for (int64_t m = 0; m < rows; ++m) silu_mul_to(c + m * width, up + m * width, out + m * a.ldo, width);
  } else if (!direct_type) {
    for (int64_t m = 0; m < rows; ++m) copy_row(c + m * width, out + m * a.ldo, width);
  }
}

void gemm_block(const GemmArgs& a, int64_t m0, int64_t m1, int64_t n0, int64_t n1, float* scratch) {
  if (a.dtype == DType::kFloat32) {
    if (a.out_dtype == DType::kFloat32) return gemm_block_typed<float, float>(a, m0, m1, n0, n1, scratch);
    return gemm_block_typed<float, uint16_t>(a, m0, m1, n0, n1, scratch);
  }
  if (a.out_dtype == DType::kFloat32) return gemm_block_typed<uint16_t, float>(a, m0, m1, n0, n1, scratch);
  return gemm_block_typed<uint16_t, uint16_t>(a, m0, m1, n0, n1, scratch);
}

// Blocked attention of a set of queries over paged keys and values (online softmax, after Dao et al., FlashAttention).
//
// Keys are taken in blocks of kKeyBlock that start at multiples of it: the block's keys are transposed into scratch, scores
// are a (queries x 64) product, and the values are read in place. The sums of one query are the same whichever other queries
// share the call, so a row's result does not depend on the batch or on shared-prefix grouping.
#pragma once

struct StrideRows {
  const float* base;
  int64_t stride;
  SIMD_INLINE const float* operator()(int64_t k) const { return base + k * stride; }
};
struct PointerRows {
  const float* const* rows;
  SIMD_INLINE const float* operator()(int64_t k) const { return rows[k]; }
};
// Prefetches part of a later row with each row. For few queries, where memory is what attention waits for: its queue of
// requests must not run dry in any phase of a block.
template <class T, class Rows>
struct PrefetchingRows {
  Rows rows;
  const T* const* ahead;  // (kKeyBlock)
  int64_t from, to;       // bytes of a row
  SIMD_INLINE const float* operator()(int64_t k) const {
    const char* next = reinterpret_cast<const char*>(ahead[k % kKeyBlock]);
    for (int64_t i = from; i < to; i += 64) __builtin_prefetch(next + i, 0, 2);
    return rows(k);
  }
};

// c[MR][NV vectors] = c * alpha + a[MR][k0..k1) * b(k)[NV vectors] at column `col`; alpha null starts from zero.
template <int MR, int NV, class Rows>
SIMD_INLINE void product_tile(const float* a, int64_t lda, Rows b, int64_t k0, int64_t k1, int64_t col, float* c, int64_t ldc,
                              const float* alpha) {
  V acc[MR][NV];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      acc[m][v] = alpha == nullptr ? zero() : mul(load(c + m * ldc + col + v * W), set1(alpha[m]));
    }
  }
  for (int64_t k = k0; k < k1; ++k) {
    const float* row = b(k) + col;
    V r[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) r[v] = load(row + v * W);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const V x = set1(a[m * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[m][v] = fma(x, r[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(c + m * ldc + col + v * W, acc[m][v]);
  }
}

template <int NV, class Rows>
void product_columns(const float* a, int64_t lda, int64_t rows, Rows b, int64_t k0, int64_t k1, int64_t col, float* c,
                     int64_t ldc, const float* alpha) {
  int64_t m = 0;
  for (; m + kTileMR <= rows; m += kTileMR) {
    product_tile<kTileMR, NV>(a + m * lda, lda, b, k0, k1, col, c + m * ldc, ldc, alpha == nullptr ? nullptr : alpha + m);
  }
  for (; m + 3 <= rows; m += 3) {
    product_tile<3, NV>(a + m * lda, lda, b, k0, k1, col, c + m * ldc, ldc, alpha == nullptr ? nullptr : alpha + m);
  }
  for (; m < rows; ++m) {
    product_tile<1, NV>(a + m * lda, lda, b, k0, k1, col, c + m * ldc, ldc, alpha == nullptr ? nullptr : alpha + m);
  }
}

// c (rows x width) = c * alpha + a * b; width is a multiple of kPad.
template <class Rows>
SIMD_INLINE void product(const float* a, int64_t lda, int64_t rows, Rows b, int64_t k0, int64_t k1, int64_t width, float* c,
                         int64_t ldc, const float* alpha) {
  int64_t col = 0;
  for (; col + kTileNV * W <= width; col += kTileNV * W) {
    product_columns<kTileNV>(a, lda, rows, b, k0, k1, col, c, ldc, alpha);
  }
  for (; col < width; col += W) product_columns<1>(a, lda, rows, b, k0, k1, col, c, ldc, alpha);
}

// kt[d][j] = keys[j][d]; keys below `first` or from `count` on are zero. Rows of `ahead` are prefetched at the same pace.
template <class T>
void transpose_keys(const T* const* keys, const T* const* ahead, int64_t first, int64_t count, int64_t dim, float* kt) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t j = 0; j < count; j += W) {
    for (int64_t d = 0; d < dim; d += W) {
      V r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const int64_t key = j + i;
        if (key >= first && key < count) {
          r[i] = load_some(keys[key] + d, dim - d);
          if (d % kLine == 0) __builtin_prefetch(ahead[key] + d, 0, 2);
        } else {
          r[i] = zero();
        }
      }
      transpose(r);
      const int64_t rows = dim - d < W ? dim - d : W;
      if (rows == W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) store(kt + (d + i) * kKeyBlock + j, r[i]);
      } else {
        for (int64_t i = 0; i < rows; ++i) store(kt + (d + i) * kKeyBlock + j, r[i]);
      }
    }
  }
  for (int64_t j = (count + W - 1) / W * W; j < kKeyBlock; j += W) {
    for (int64_t d = 0; d < dim; ++d) store(kt + d * kKeyBlock + j, zero());
  }
}

// Turns a block's scores into weights exp(s - m) and returns the factor for what was summed before.
SIMD_INLINE float softmax_block(float* s, int64_t lo, int64_t hi, float softcap, float* m, float* l) {
  constexpr int kVectors = kKeyBlock / W;
  if (softcap > 0.0f) {
    const V cap = set1(softcap), inverse = set1(1.0f / softcap);
    for (int v = 0; v < kVectors; ++v) store(s + v * W, mul(cap, vtanh(mul(load(s + v * W), inverse))));
  }
  const float lowest = -__builtin_inff();
  for (int64_t j = 0; j < lo && j < kKeyBlock; ++j) s[j] = lowest;
  for (int64_t j = hi < 0 ? 0 : hi; j < kKeyBlock; ++j) s[j] = lowest;
  V best = load(s);
#pragma GCC unroll 16
  for (int v = 1; v < kVectors; ++v) best = vmax(best, load(s + v * W));
  const float block_max = hmax(best);
  const float top = block_max > *m ? block_max : *m;
  if (top == lowest) {
    for (int v = 0; v < kVectors; ++v) store(s + v * W, zero());
    return 1.0f;
  }
  const V shift = set1(top);
  V sum = zero();
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const V p = vexp(sub(load(s + v * W), shift));
    store(s + v * W, p);
    sum = add(sum, p);
  }
  const float alpha = top == *m ? 1.0f : exp1(*m - top);
  *l = *l * alpha + hsum(sum);
  *m = top;
  return alpha;
}

// Where the keys and values of positions [start + first, start + count) lie.
template <class T>
struct Block {
  int64_t first, count;
  const T* keys[kKeyBlock];
  const T* values[kKeyBlock];

  // False where a page id is out of range. Pointers beside the range repeat its ends, so that each may be prefetched.
  SIMD_INLINE bool locate(const CacheView& c, int64_t head, const int32_t* pages, int64_t start, int64_t begin, int64_t end) {
    first = begin > start ? begin - start : 0;
    count = end - start < kKeyBlock ? end - start : kKeyBlock;
    const T* k = static_cast<const T*>(c.k.data) + head * c.k.head_stride;
    const T* v = static_cast<const T*>(c.v.data) + head * c.v.head_stride;
    int64_t index = (start + first) / c.page_size, offset = (start + first) % c.page_size;
    for (int64_t j = first; j < count; ++index, offset = 0) {
      const int64_t page = pages[index];
      if (page < 0 || page >= c.num_pages) return false;
      const T* key = k + page * c.k.page_stride + offset * c.k.token_stride;
      const T* value = v + page * c.v.page_stride + offset * c.v.token_stride;
      for (; offset < c.page_size && j < count; ++offset, ++j, key += c.k.token_stride, value += c.v.token_stride) {
        keys[j] = key;
        values[j] = value;
      }
    }
    for (int64_t j = 0; j < first; ++j) keys[j] = keys[first], values[j] = values[first];
    for (int64_t j = count; j < kKeyBlock; ++j) keys[j] = keys[count - 1], values[j] = values[count - 1];
    return true;
  }
};

template <class T>
int32_t attend_typed(const AttendArgs& a) {
  const CacheView& cache = *a.cache;
  const int64_t dim = cache.k.dim, value_dim = cache.v.dim, pad = padded(value_dim);
  float* kt = a.work;                             // (dim, kKeyBlock)
  float* packed = kt + padded(dim) * kKeyBlock;   // (kKeyBlock, pad): values, where they cannot be read in place
  float* alpha = packed + pad * kKeyBlock;        // (queries)
  float* scores = alpha + padded(a.queries);      // (queries, kKeyBlock)
  Block<T> blocks[2];
  const float* value_rows[kKeyBlock];
  int64_t start = a.begin / kKeyBlock * kKeyBlock;
  if (start >= a.end) return kOk;
  if (!blocks[0].locate(cache, a.head, a.pages, start, a.begin, a.end)) return kPageOutOfRange;
  for (int64_t number = 0; start < a.end; start += kKeyBlock, ++number) {
    const Block<T>& block = blocks[number % 2];
    Block<T>& later = blocks[(number + 1) % 2];
    const int64_t first = block.first, count = block.count, after = start + kKeyBlock;
    const Block<T>* ahead = &later;
    if (after < a.end) {
      if (!later.locate(cache, a.head, a.pages, after, a.begin, a.end)) return kPageOutOfRange;
    } else if (a.next_pages == nullptr || !later.locate(cache, a.next_head, a.next_pages, a.next_begin / kKeyBlock * kKeyBlock,
                                                        a.next_begin, a.next_end)) {
      ahead = &block;  // nothing to fetch
    }
    transpose_keys(block.keys, ahead->keys, first, count, dim, kt);
    const bool few = a.queries <= kTileMR;
    const int64_t value_bytes = value_dim * static_cast<int64_t>(sizeof(T)), half = value_bytes / 128 * 64;
    const StrideRows kt_rows{kt, kKeyBlock};
    if (few) {
      const PrefetchingRows<T, StrideRows> rows{kt_rows, ahead->values, 0, half};
      product(a.q, dim, a.queries, rows, 0, dim, kKeyBlock, scores, kKeyBlock, nullptr);
    } else {
      product(a.q, dim, a.queries, kt_rows, 0, dim, kKeyBlock, scores, kKeyBlock, nullptr);
    }
    for (int64_t i = 0; i < a.queries; ++i) {
      alpha[i] = softmax_block(scores + i * kKeyBlock, a.lo[i] - start, a.hi[i] - start, a.softcap, a.m + i, a.l + i);
    }
    bool in_place = false;
    if constexpr (sizeof(T) == sizeof(float)) {
      in_place = pad == value_dim;
      if (in_place) {
        for (int64_t j = first; j < count; ++j) value_rows[j] = block.values[j];
      }
    }
    if (!in_place) {
      for (int64_t j = first; j < count; ++j) {
        float* row = packed + j * pad;
        for (int64_t d = 0; d < value_dim; d += W) store(row + d, load_some(block.values[j] + d, value_dim - d));
        for (int64_t d = (value_dim + W - 1) / W * W; d < pad; d += W) store(row + d, zero());
        value_rows[j] = row;
      }
    }
    if (few) {
      const PrefetchingRows<T, PointerRows> rows{PointerRows{value_rows}, ahead->values, half, value_bytes};
      product(scores, kKeyBlock, a.queries, rows, first, count, pad, a.o, pad, alpha);
    } else {
      product(scores, kKeyBlock, a.queries, PointerRows{value_rows}, first, count, pad, a.o, pad, alpha);
    }
  }
  return kOk;
}

int32_t attend(const AttendArgs& a) {
  return a.cache->dtype == DType::kFloat32 ? attend_typed<float>(a) : attend_typed<uint16_t>(a);
}

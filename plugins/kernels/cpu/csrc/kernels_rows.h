// Row-wise kernels: norms, rotary embedding with paged write, activation, conversions, argmax. Arithmetic is fp32; a value is
// rounded to the tensor's type where the tensor is written.
#pragma once

template <class T>
SIMD_INLINE V load_some(const T* p, int64_t left) {
  return left >= W ? load(p) : load_n(p, static_cast<int>(left));
}
template <class T>
SIMD_INLINE void store_some(T* p, V a, int64_t left) {
  if (left >= W) {
    store(p, a);
  } else {
    store_n(p, a, static_cast<int>(left));
  }
}

// y = x / rms(x) * weight; x and y may be the same row.
template <class Tx, class Tw, class Ty>
SIMD_INLINE void rms_row(const Tx* x, const Tw* weight, Ty* y, int64_t n, float eps) {
  V squares[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (int j = 0; j < 4; ++j) {
      const V v = load(x + i + j * W);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for (; i < n; i += W) {
    const V v = load_some(x + i, n - i);
    squares[0] = fma(v, v, squares[0]);
  }
  const float mean = hsum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(n);
  const V scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i < n; i += W) {
    store_some(y + i, mul(mul(load_some(x + i, n - i), scale), load_some(weight + i, n - i)), n - i);
  }
}

template <class T, class Tw>
void norm_rows_typed(const NormArgs& a, int64_t t0, int64_t t1) {
  const int64_t n = a.hidden;
  for (int64_t t = t0; t < t1; ++t) {
    const T* x = static_cast<const T*>(a.x) + t * n;
    if (a.residual != nullptr) {
      T* residual = static_cast<T*>(a.residual) + t * n;
      for (int64_t i = 0; i < n; i += W) {
        store_some(residual + i, add(load_some(residual + i, n - i), load_some(x + i, n - i)), n - i);
      }
      x = residual;
    }
    rms_row(x, static_cast<const Tw*>(a.weight), static_cast<T*>(a.out) + t * n, n, a.eps);
  }
}

void norm_rows(const NormArgs& a, int64_t t0, int64_t t1) {
  const bool x32 = a.dtype == DType::kFloat32, w32 = a.weight_dtype == DType::kFloat32;
  if (x32 && w32) return norm_rows_typed<float, float>(a, t0, t1);
  if (x32) return norm_rows_typed<float, uint16_t>(a, t0, t1);
  if (w32) return norm_rows_typed<uint16_t, float>(a, t0, t1);
  return norm_rows_typed<uint16_t, uint16_t>(a, t0, t1);
}

template <class Tx, class Ty>
SIMD_INLINE void convert_row(const Tx* x, Ty* y, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store_some(y + i, load_some(x + i, n - i), n - i);
}

// head: (dim) of token `slot` and kv head `h` into one side of the cache.
template <class Tx>
SIMD_INLINE void write_cache_row(const Tx* head, const CacheView& c, const CachePlane& plane, int64_t slot, int64_t h) {
  const int64_t at = slot / c.page_size * plane.page_stride + slot % c.page_size * plane.token_stride + h * plane.head_stride;
  if (c.dtype == DType::kFloat32) {
    convert_row(head, static_cast<float*>(plane.data) + at, plane.dim);
  } else {
    convert_row(head, static_cast<uint16_t*>(plane.data) + at, plane.dim);
  }
}

SIMD_INLINE bool slot_in_range(const CacheView& c, int64_t slot) { return slot < c.num_pages * c.page_size; }

constexpr int64_t kMaxHeadDim = 1024;

// Optional RMS norm, then rotation of the first rotary_dim values by (cos, sin); head may equal out.
template <class T>
SIMD_INLINE void rotate_head(const T* head, T* out, const RopeArgs& a, const T* norm, const float* cos_sin) {
  float row[kMaxHeadDim + kPad];
  const int64_t d = a.head_dim, half = a.rotary_dim / 2;
  const float* cosine = cos_sin;
  const float* sine = cos_sin + half;
  if (norm != nullptr) {
    rms_row(head, norm, row, d, a.eps);
  } else {
    convert_row(head, row, d);
  }
  if (a.interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float x = row[2 * i], y = row[2 * i + 1];
      row[2 * i] = x * cosine[i] - y * sine[i];
      row[2 * i + 1] = y * cosine[i] + x * sine[i];
    }
  } else {
    for (int64_t i = 0; i < half; i += W) {
      const int64_t left = half - i;
      const V x = load_some(row + i, left), y = load_some(row + half + i, left);
      const V c = load_some(cosine + i, left), s = load_some(sine + i, left);
      store_some(row + i, sub(mul(x, c), mul(y, s)), left);
      store_some(row + half + i, fma(y, c, mul(x, s)), left);
    }
  }
  convert_row(row, out, d);
}

template <class T>
int32_t rope_rows_typed(const RopeArgs& a, int64_t t0, int64_t t1) {
  const int64_t d = a.head_dim;
  T rotated[kMaxHeadDim + kPad];
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t position = a.positions_64 ? static_cast<const int64_t*>(a.positions)[t]
                                            : static_cast<const int32_t*>(a.positions)[t];
    if (position < 0 || position >= a.max_position) return kPositionOutOfRange;
    const float* cos_sin = a.cos_sin + position * a.rotary_dim;
    const T* q = static_cast<const T*>(a.q) + t * a.q_stride;
    T* q_out = static_cast<T*>(a.q_out) + t * a.q_out_stride;
    for (int64_t h = 0; h < a.q_heads; ++h) {
      rotate_head(q + h * d, q_out + h * d, a, static_cast<const T*>(a.q_norm), cos_sin);
    }
    const int64_t slot = a.write_cache ? a.slots[t] : -1;
    if (slot >= 0 && !slot_in_range(a.cache, slot)) return kSlotOutOfRange;
    if (slot < 0 && a.k_out == nullptr) continue;
    const T* k = static_cast<const T*>(a.k) + t * a.k_stride;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      T* key = a.k_out != nullptr ? static_cast<T*>(a.k_out) + t * a.k_out_stride + h * d : rotated;
      rotate_head(k + h * d, key, a, static_cast<const T*>(a.k_norm), cos_sin);
      if (slot >= 0) {
        write_cache_row(key, a.cache, a.cache.k, slot, h);
        write_cache_row(static_cast<const T*>(a.v) + t * a.v_stride + h * d, a.cache, a.cache.v, slot, h);
      }
    }
  }
  return kOk;
}

int32_t rope_rows(const RopeArgs& a, int64_t t0, int64_t t1) {
  return a.dtype == DType::kFloat32 ? rope_rows_typed<float>(a, t0, t1) : rope_rows_typed<uint16_t>(a, t0, t1);
}

template <class T>
int32_t cache_write_rows_typed(const CacheWriteArgs& a, int64_t t0, int64_t t1) {
  for (int64_t t = t0; t < t1; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    if (!slot_in_range(a.cache, slot)) return kSlotOutOfRange;
    for (int64_t h = 0; h < a.cache.kv_heads; ++h) {
      write_cache_row(static_cast<const T*>(a.k) + t * a.k_stride + h * a.cache.k.dim, a.cache, a.cache.k, slot, h);
      write_cache_row(static_cast<const T*>(a.v) + t * a.v_stride + h * a.cache.v.dim, a.cache, a.cache.v, slot, h);
    }
  }
  return kOk;
}

int32_t cache_write_rows(const CacheWriteArgs& a, int64_t t0, int64_t t1) {
  return a.dtype == DType::kFloat32 ? cache_write_rows_typed<float>(a, t0, t1)
                                    : cache_write_rows_typed<uint16_t>(a, t0, t1);
}

template <Activation A, class T>
void gated_row_typed(const void* gate, const void* up, void* out, int64_t n) {
  const T* g = static_cast<const T*>(gate);
  const T* u = static_cast<const T*>(up);
  T* o = static_cast<T*>(out);
  for (int64_t i = 0; i < n; i += W) {
    const V a = load_some(g + i, n - i), b = load_some(u + i, n - i);
    store_some(o + i, A == Activation::kSilu ? silu_mul(a, b) : gelu_tanh_mul(a, b), n - i);
  }
}

void gated_row(const void* gate, const void* up, void* out, int64_t n, DType dtype, Activation activation) {
  const bool silu = activation == Activation::kSilu;
  if (dtype == DType::kFloat32) {
    return silu ? gated_row_typed<Activation::kSilu, float>(gate, up, out, n)
                : gated_row_typed<Activation::kGeluTanh, float>(gate, up, out, n);
  }
  return silu ? gated_row_typed<Activation::kSilu, uint16_t>(gate, up, out, n)
              : gated_row_typed<Activation::kGeluTanh, uint16_t>(gate, up, out, n);
}

template <class Tx, class Ty>
SIMD_INLINE void scaled_row(const Tx* x, Ty* y, int64_t n, float scale) {
  const V s = set1(scale);
  for (int64_t i = 0; i < n; i += W) store_some(y + i, mul(load_some(x + i, n - i), s), n - i);
}

void load_scaled(const void* src, float* dst, int64_t n, float scale, DType dtype) {
  if (dtype == DType::kFloat32) return scaled_row(static_cast<const float*>(src), dst, n, scale);
  scaled_row(static_cast<const uint16_t*>(src), dst, n, scale);
}

void store_scaled(const float* src, void* dst, int64_t n, float scale, DType dtype) {
  if (dtype == DType::kFloat32) return scaled_row(src, static_cast<float*>(dst), n, scale);
  scaled_row(src, static_cast<uint16_t*>(dst), n, scale);
}

void axpy(float* acc, const float* x, int64_t n, float scale) {
  const V s = set1(scale);
  for (int64_t i = 0; i < n; i += W) store_some(acc + i, fma(load_some(x + i, n - i), s, load_some(acc + i, n - i)), n - i);
}

// Largest value first, then its first place: the second pass reads what the first left in the cache.
template <class T>
ArgmaxPart argmax_typed(const T* x, int64_t n) {
  NanFlag nan;
  V best = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const V v = load(x + i);
    nan.check(v);
    best = vmax(best, v);
  }
  float top = hmax(best);
  for (; i < n; ++i) {
    float lane[W];
    store(lane, load_n(x + i, 1));
    if (lane[0] != lane[0]) return {top, 1, -1};
    top = lane[0] > top ? lane[0] : top;
  }
  if (nan.any()) return {top, 1, -1};
  for (i = 0; i < n; i += W) {
    float lane[W];
    const int count = n - i < W ? static_cast<int>(n - i) : W;
    store(lane, count == W ? load(x + i) : load_n(x + i, count));
    for (int j = 0; j < count; ++j) {
      if (lane[j] == top) return {top, 0, i + j};
    }
  }
  return {top, 0, 0};
}

ArgmaxPart argmax_part(const void* x, int64_t n, DType dtype) {
  return dtype == DType::kFloat32 ? argmax_typed(static_cast<const float*>(x), n)
                                  : argmax_typed(static_cast<const uint16_t*>(x), n);
}

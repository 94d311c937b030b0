// Vector functions made of an instruction set's primitives.
#pragma once

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (error below 6e-9), scaled by 2^n.
// Below -87.3 the result is exactly 0, so that masked scores of -inf vanish; above 88.7 it is infinite.
SIMD_INLINE V vexp(V x) {
  const V clamped = vmin(set1(89.0f), vmax(set1(-87.4f), x));  // this operand order keeps a NaN
  const V n = round_nearest(mul(clamped, set1(1.44269504f)));
  const V r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));  // ln 2 in two parts, the first exact
  V p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return zero_below(x, set1(-87.3f), scale_by_pow2(p, n));
}

SIMD_INLINE float exp1(float x) {
  float lane[W];
  store(lane, vexp(set1(x)));
  return lane[0];
}

SIMD_INLINE V silu_mul(V gate, V up) {
  return mul(div(gate, add(set1(1.0f), vexp(sub(zero(), gate)))), up);
}

// 0.5 x (1 + tanh(y)) = x / (1 + e^(-2y)) with y = sqrt(2 / pi) (x + 0.044715 x^3).
SIMD_INLINE V gelu_tanh_mul(V gate, V up) {
  const V cubic = fma(mul(mul(gate, gate), gate), set1(0.044715f), gate);
  return mul(div(gate, add(set1(1.0f), vexp(mul(cubic, set1(-1.59576912f))))), up);
}

// tanh(y) = 1 - 2 / (e^(2y) + 1)
SIMD_INLINE V vtanh(V y) { return sub(set1(1.0f), div(set1(2.0f), add(vexp(add(y, y)), set1(1.0f)))); }

// What the policies know of the past: running means in whole numbers, so that every replica and every replay agrees to the bit.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tokenspeed {

// An exponentially weighted mean, kept in 1/256 units; a new value counts for 1/2^kShift.
template <int kShift>
class RunningMean {
 public:
  void Observe(int64_t value) noexcept {
    value_ = seen_ ? value_ + ((value * 256 - value_) >> kShift) : value * 256;
    seen_ = true;
  }
  [[nodiscard]] bool seen() const noexcept { return seen_; }
  [[nodiscard]] int64_t value() const noexcept { return value_ / 256; }

 private:
  int64_t value_ = 0;
  bool seen_ = false;
};

// Lengths of the outputs that ended of late.
class OutputLengths {
 public:
  void Observe(int32_t tokens) noexcept { mean_.Observe(tokens); }
  // Tokens; before anything was observed a guess that is neither nothing nor the worst case.
  [[nodiscard]] int32_t Mean() const noexcept { return mean_.seen() ? static_cast<int32_t>(std::max<int64_t>(1, mean_.value())) : 256; }

 private:
  RunningMean<4> mean_;
};

// How long a step with decodes takes, as a line over its prefill tokens: the least-squares line of what was observed of late.
class StepTimes {
 public:
  void Observe(int32_t prefill_tokens, int32_t decode_rows, int64_t step_us) noexcept {
    if (step_us <= 0 || decode_rows == 0) return;  // a step without decodes delays nobody
    const int64_t x = prefill_tokens;
    x_.Observe(x);
    y_.Observe(step_us);
    xx_.Observe(x * x);
    xy_.Observe(x * step_us);
  }
  // The prefill tokens that keep a step with decodes within `max_step_us`; `untried` before any was timed.
  [[nodiscard]] int64_t PrefillTokensWithin(int64_t max_step_us, int64_t untried) const noexcept {
    if (!x_.seen()) return untried;
    const int64_t x = x_.value();
    const int64_t y = y_.value();
    const int64_t variance = xx_.value() - x * x;
    const int64_t covariance = xy_.value() - x * y;
    if (variance > 0 && covariance > 0) {
      const int64_t left_us = max_step_us - (y - covariance * x / variance);
      return std::max<int64_t>(0, left_us) * variance / covariance;
    }
    // All steps alike tell no slope: feel the way.
    return y <= max_step_us ? std::max(untried, x + x / 4) : x / 2;
  }

 private:
  RunningMean<4> x_, y_, xx_, xy_;
};

}  // namespace tokenspeed

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

// How long a step takes: a mean for its decodes and a mean for each prefill token beside them.
class StepTimes {
 public:
  void Observe(int32_t prefill_tokens, int32_t decode_rows, int64_t step_us) noexcept {
    if (step_us <= 0) return;
    if (prefill_tokens == 0) {
      decode_us_.Observe(step_us);
    } else {
      const int64_t decodes = decode_rows > 0 ? decode_us_.value() : 0;
      prefill_ns_.Observe(std::max<int64_t>(1, (step_us - decodes) * 1000 / prefill_tokens));
    }
  }
  // The prefill tokens that keep a step with decodes within `max_step_us`; `untried` before any prefill was timed.
  [[nodiscard]] int64_t PrefillTokensWithin(int64_t max_step_us, int64_t untried) const noexcept {
    if (!prefill_ns_.seen()) return untried;
    return std::max<int64_t>(0, max_step_us - decode_us_.value()) * 1000 / std::max<int64_t>(1, prefill_ns_.value());
  }

 private:
  RunningMean<3> decode_us_;
  RunningMean<3> prefill_ns_;
};

}  // namespace tokenspeed

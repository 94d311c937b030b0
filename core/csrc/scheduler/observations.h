// What the policies know of the past. Whole numbers where those do, else doubles of + - * / and sqrt without contraction (a compile
// option): every replica and every replay agrees to the bit.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
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

// What the prompt tokens of a step cost. A token costs one, and `weight` for each token that it attends to, its own half of the chunk
// included: a chunk of q tokens behind a context of c costs q * (1 + weight * (c + q / 2)), in tokens without context.
//
// The weight is d / b of the least-squares fit of (step time - that of decodes alone) = b * tokens + d * attended over recent steps.
class PrefillCost {
 public:
  // More than any prompt costs.
  static constexpr double kUnbounded = 1e30;

  [[nodiscard]] static double Attended(int32_t tokens, int32_t context) noexcept { return tokens * (context + 0.5 * tokens); }
  [[nodiscard]] double operator()(int64_t tokens, double attended) const noexcept { return static_cast<double>(tokens) + weight_ * attended; }
  // The chunk behind `context` that costs `cost`, to the nearest token.
  [[nodiscard]] int64_t TokensFor(double cost, int32_t context) const noexcept {
    const double linear = 1.0 + weight_ * context;
    const double tokens = 2.0 * cost / (linear + std::sqrt(linear * linear + 2.0 * weight_ * cost));
    return static_cast<int64_t>(std::min(tokens, double{1 << 30}) + 0.5);
  }
  // `filled`: the step had most of the prompt tokens that it could have. Smaller ones tell more of what every step costs.
  void Observe(int32_t tokens, double attended, int32_t decode_rows, bool filled, int64_t step_us) noexcept {
    if (step_us <= 0) return;
    const auto time = static_cast<double>(step_us);
    if (tokens == 0) {
      decodes_us_ = decodes_us_ == 0.0 ? time : decodes_us_ + (time - decodes_us_) / kSteps;
      return;
    }
    if (!filled) return;
    const double x = tokens;
    const double y = std::max(1.0, decode_rows > 0 ? time - decodes_us_ : time);
    const std::array<double, 5> products{x * x, x * attended, attended * attended, x * y, attended * y};
    for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += products[i] - sums_[i] / kSteps;
    Fit();
  }
  [[nodiscard]] double weight() const noexcept { return weight_; }

 private:
  static constexpr double kSteps = 16.0;  // a step counts a 16th less with each that comes after it

  void Fit() noexcept {
    const auto& [xx, xz, zz, xy, zy] = sums_;
    // Contexts all alike tell nothing of their weight; what was known before is kept.
    if (xx * zz - xz * xz <= xx * zz / 16.0) return;
    // A ridge on d, small beside the spread: where chunks are cut by the weight itself, times alone would confirm any weight.
    const double ridged = zz + zz / 64.0;
    const double b = ridged * xy - xz * zy;
    const double d = xx * zy - xz * xy;
    if (b <= 0.0) return;
    const double fitted = std::max(0.0, d / b);
    weight_ = fitted_ ? 0.5 * (weight_ + fitted) : fitted;
    fitted_ = true;
  }

  double decodes_us_ = 0.0;       // of steps without prompt tokens
  std::array<double, 5> sums_{};  // tokens^2, tokens * attended, attended^2, tokens * time, attended * time
  double weight_ = 0.0;
  bool fitted_ = false;
};

// How long a step with decodes takes, as a line over the cost of its prompt tokens: the least-squares line of what was observed of late.
class StepTimes {
 public:
  void Observe(int64_t prefill_cost, int32_t decode_rows, int64_t step_us) noexcept {
    if (step_us <= 0 || decode_rows == 0) return;  // a step without decodes delays nobody
    const int64_t x = prefill_cost;
    x_.Observe(x);
    y_.Observe(step_us);
    xx_.Observe(x * x);
    xy_.Observe(x * step_us);
  }
  // The prefill cost that keeps a step with decodes within `max_step_us`; `untried` before any was timed.
  [[nodiscard]] int64_t PrefillCostWithin(int64_t max_step_us, int64_t untried) const noexcept {
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

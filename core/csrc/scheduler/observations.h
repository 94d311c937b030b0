// What the policies know of the past. Whole numbers where those do, else doubles of + - * / and sqrt without contraction (a compile
// option): every replica and every replay agrees to the bit.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>

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
  // Takes the weight that something else fitted.
  void Follow(double weight) noexcept { weight_ = weight; }
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

// How long a step with decodes takes: what it takes without prompts, so much more for each prompt token, and so much for each token that
// those attend to. A Kalman filter (Kalman, 1960) over the three: a step's error is divided among them by how uncertain each is, each drifts
// slowly, and many steps without prompts leave what was learnt of prompts as it is.
class StepTimes {
 public:
  // `tokens`: prompt tokens that the device computes, places that it fills up included. `filled`: most of those that there could have
  // been. Fewer tell nothing of what a token costs, as a device that waits for its weights computes them for nothing.
  void Observe(int64_t tokens, double attended, int32_t decode_rows, bool filled, int64_t step_us) noexcept {
    if (step_us <= 0 || decode_rows == 0) return;  // a step without decodes delays nobody
    const bool tells = tokens > 0 && filled;
    const auto time = static_cast<double>(step_us);
    const std::array<double, 3> h{1.0, static_cast<double>(tokens) / kTokens, attended / kAttended};
    if (!timed_) {
      Begin(decode_rows, tokens == 0 ? time : 0.5 * time, tokens == 0 ? 0.1 * time : 0.5 * time);
      if (tokens == 0) return;
    }
    if (tells) most_ = std::max(most_, tokens);
    if (tells && !tried_) return Try(std::max(time - us_[0], time / 16.0) / h[1]);
    Drift(decode_rows, tells);
    Correct(h, time, tells ? 3 : 1);
  }
  // The prefill cost, in tokens without context, that keeps a step with decodes within `max_step_us`, and at most twice what was ever
  // timed; `untried` before any was.
  [[nodiscard]] double PrefillCostWithin(double max_step_us, double untried) const noexcept {
    if (timed_ && us_[0] >= max_step_us) return 0.0;
    if (!tried_) return untried;
    return std::min((max_step_us - us_[0]) / us_[1] * kTokens, std::max(untried, 2.0 * static_cast<double>(most_)));
  }
  [[nodiscard]] bool tried() const noexcept { return tried_; }
  // What a prompt token costs for each token that it attends to, in tokens.
  [[nodiscard]] double weight() const noexcept { return tried_ ? us_[2] / us_[1] * (kTokens / kAttended) : 0.0; }

 private:
  static constexpr double kTokens = 1024.0;  // units in which the three come out alike
  static constexpr double kAttended = 4194304.0;
  static constexpr double kDrift = 0.01;  // how far each may have moved since the step before, of its value
  static constexpr double kNoise = 0.05;  // of a step's time, standard deviation

  static constexpr double Square(double x) noexcept { return x * x; }

  void Begin(int32_t decode_rows, double us, double deviation) noexcept {
    timed_ = true;
    rows_ = decode_rows;
    us_[0] = us;
    p_[0][0] = Square(deviation);
  }
  // The first step with prompts: all that it took more is taken to be for their tokens.
  void Try(double us) noexcept {
    tried_ = true;
    us_[1] = us;
    us_[2] = 0.0;
    p_[0] = {p_[0][0], 0.0, 0.0};
    p_[1] = {0.0, Square(0.5 * us), 0.0};
    p_[2] = {0.0, 0.0, Square(0.5 * us)};
  }
  void Drift(int32_t decode_rows, bool prompts) noexcept {
    // Rows that came or went: half of the decodes' time is taken to be in proportion to them.
    const double change = 0.5 * us_[0] * std::abs(decode_rows - rows_) / std::max(decode_rows, rows_);
    rows_ = decode_rows;
    p_[0][0] += Square(change) + Square(kDrift * us_[0]);
    if (!prompts) return;
    p_[1][1] += Square(kDrift * us_[1]);
    p_[2][2] += Square(kDrift * us_[1]);
  }
  // The first `learning` of the three, with regard to how uncertain the others are.
  void Correct(const std::array<double, 3>& h, double time, size_t learning) noexcept {
    std::array<double, 3> ph{};
    double predicted = 0.0;
    double variance = 0.0;
    for (size_t i = 0; i < 3; ++i) {
      for (size_t j = 0; j < 3; ++j) ph[i] += p_[i][j] * h[j];
      predicted += us_[i] * h[i];
      variance += h[i] * ph[i];
    }
    variance += Square(kNoise * std::max(predicted, 1.0));
    // A step out of line (a compilation, a pause) counts as one at three standard deviations; where they keep coming the times have
    // changed, and with a covariance that grows each time they are believed soon.
    const double most = 3.0 * std::sqrt(variance);
    const double error = time - predicted;
    const double heard = std::clamp(error, -most, most);
    const double wider = heard == error ? 1.0 : 2.0;
    for (size_t i = 0; i < 3; ++i) {
      if (i < learning) us_[i] += ph[i] / variance * heard;
      for (size_t j = 0; j < 3; ++j) {
        if (std::min(i, j) >= learning) continue;
        p_[i][j] = (p_[i][j] - ph[i] / variance * ph[j]) * (i < learning ? wider : 1.0) * (j < learning ? wider : 1.0);
      }
    }
    us_[0] = std::max(us_[0], 0.0);
    us_[2] = std::max(us_[2], 0.0);
    tried_ = tried_ && us_[1] > 0.0;
  }

  std::array<double, 3> us_{};  // without prompts; for kTokens prompt tokens; for kAttended tokens that they attend to
  std::array<std::array<double, 3>, 3> p_{};  // the covariance of their errors
  int32_t rows_ = 0;
  int64_t most_ = 0;  // prompt tokens of a step, ever
  bool timed_ = false;
  bool tried_ = false;  // with prompts
};

}  // namespace tokenspeed

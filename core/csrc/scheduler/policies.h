// Policies: const function objects in a variant. They hold no state; what was observed is passed in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "scheduler/config.h"
#include "scheduler/observations.h"

namespace tokenspeed {

// ---- prefill: what is left of a step for prompts ----

// Tokens bound the step's buffers, cost its time. While decodes run, a step's prompts cost no more than a chunk of all its tokens
// without context would, so a chunk behind a long context is shorter: the decodes wait as long for each chunk of a prompt. Where the device
// fills steps up, places left empty are time lost: a chunk cut for its cost is cut to what fills the step.
struct PrefillShare {
  int32_t tokens = 0;
  double cost = PrefillCost::kUnbounded;
  int32_t least = 1;  // tokens that are planned whatever they cost
  const SchedulerConfig* sizes = nullptr;  // step_sizes that its chunks together are cut to
  int32_t planned = 0;                     // tokens so far

  [[nodiscard]] bool used_up() const noexcept { return tokens <= 0 || (least <= 0 && cost < 1.0); }
  [[nodiscard]] bool MostlySpentBy(int64_t spent, double spent_cost) const noexcept { return 2 * spent >= tokens || 2.0 * spent_cost >= cost; }
  // The tokens for a prompt that has `remaining` of them behind `context`.
  [[nodiscard]] int32_t Fit(int32_t remaining, int32_t context, const PrefillCost& cost_of) const noexcept {
    const int64_t affordable = std::max<int64_t>(cost_of.TokensFor(cost, context), std::max(least, 1));
    const auto fitting = static_cast<int32_t>(std::min<int64_t>({remaining, tokens, affordable}));
    if (sizes == nullptr || fitting < affordable) return fitting;
    const int32_t whole = Reach(fitting) - planned;
    return whole > 0 ? std::min({remaining, tokens, whole}) : fitting;
  }
  // REQUIRES: `now` is of a prompt for which Fit gave `fitting`, for lack of pages perhaps less than that.
  void Spend(int32_t now, int32_t fitting, int32_t remaining, int32_t context, const PrefillCost& cost_of) noexcept {
    // One that was cut for its cost has all that was left, so that rounding leaves no crumb for the next.
    const bool cut = fitting < remaining && fitting < tokens;
    cost = cut ? 0.0 : cost - cost_of(now, PrefillCost::Attended(now, context));
    tokens -= now;
    least -= now;
    planned += now;
    if (sizes == nullptr || cost <= 0.0) return;
    if (Reach(static_cast<int32_t>(std::min<int64_t>(tokens, cost_of.TokensFor(cost, 0)))) <= planned) cost = 0.0;
  }

 private:
  // The step's prompt tokens with up to so many more: a whole size, and at least the one that is computed anyway.
  [[nodiscard]] int32_t Reach(int32_t more) const noexcept { return std::max(sizes->WholeStep(planned + more), sizes->FilledStep(planned)); }
};

// ---- admission: output tokens to keep room for, for a request that has made `made` of at most `limit` ----

struct ExpectedOutput {
  // The mean of what was observed; one that has outlived the mean is given a quarter of it again.
  int32_t operator()(int32_t made, int32_t limit, int32_t observed_mean) const noexcept {
    return std::min(limit - made, std::max({observed_mean - made, observed_mean / 4, int32_t{1}}));
  }
};
struct WholeOutput {
  int32_t operator()(int32_t made, int32_t limit, int32_t) const noexcept { return limit - made; }
};
using AdmissionPolicy = std::variant<ExpectedOutput, WholeOutput>;

// ---- retraction: the candidate with the lowest cost goes first, within one priority ----

struct RetractionCandidate {
  int64_t tokens_to_restore;  // computed tokens that nobody else keeps
  uint64_t arrival;           // grows with each request submitted
};
struct CheapestToRestore {
  int64_t operator()(const RetractionCandidate& candidate) const noexcept { return candidate.tokens_to_restore; }
};
struct Youngest {
  int64_t operator()(const RetractionCandidate& candidate) const noexcept { return -static_cast<int64_t>(candidate.arrival); }
};
using RetractionPolicy = std::variant<CheapestToRestore, Youngest>;

[[nodiscard]] inline AdmissionPolicy MakeAdmissionPolicy(AdmissionRule rule) {
  if (rule == AdmissionRule::kWholeOutput) return WholeOutput{};
  return ExpectedOutput{};
}
[[nodiscard]] inline RetractionPolicy MakeRetractionPolicy(RetractionRule rule) {
  if (rule == RetractionRule::kYoungest) return Youngest{};
  return CheapestToRestore{};
}

}  // namespace tokenspeed

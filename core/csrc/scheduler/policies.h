// Policies: const function objects in a variant. They hold no state; what was observed is passed in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "scheduler/config.h"

namespace tokenspeed {

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

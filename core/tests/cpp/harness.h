// A scheduler with the smallest engine around it: every call is followed by CheckIntegrity.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <vector>

#include "scheduler/scheduler.h"

namespace tokenspeed {

struct Options {
  int32_t page = 4, pages = 64, seqs = 4, budget = 16, model_len = 1'000, width = 1, overlap = 0;
};

inline SchedulerConfig ConfigOf(const Options& options) {
  SchedulerConfig config;
  config.groups = {{options.page, options.pages, CacheGroupKind::kFull}};
  config.max_num_seqs = options.seqs;
  config.max_batched_tokens = options.budget;
  config.max_model_len = options.model_len;
  config.max_row_width = options.width;
  config.overlap_depth = options.overlap;
  return config;
}

// Tokens first, first + 1, ...
inline std::vector<int32_t> Sequence(int32_t first, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

class Harness {
 public:
  explicit Harness(const Options& options = {}) : Harness(ConfigOf(options)) {}
  explicit Harness(const SchedulerConfig& config) : scheduler(config) {}

  RequestSpec Spec(int64_t id, std::vector<int32_t> tokens, int64_t max_new = 4) {
    RequestSpec spec;
    spec.id = id;
    spec.tokens = std::move(tokens);
    spec.max_new_tokens = max_new;
    return spec;
  }
  SubmitResult Submit(RequestSpec spec) {
    std::vector<RequestSpec> specs;
    specs.push_back(std::move(spec));
    SubmitResult result = scheduler.SubmitRequests(std::move(specs), now)[0];
    scheduler.CheckIntegrity();
    return result;
  }
  SubmitResult Submit(int64_t id, std::vector<int32_t> tokens, int64_t max_new = 4) { return Submit(Spec(id, std::move(tokens), max_new)); }

  const ExecutionPlan& Plan() {
    const ExecutionPlan& plan = scheduler.NextExecutionPlan(++now);
    scheduler.CheckIntegrity();
    if (plan.num_rows() > 0) in_flight.push_back(&plan);
    for (size_t i = 0; i < plan.finished_ids.size(); ++i) {
      EXPECT_TRUE(finished.emplace(plan.finished_ids[i], static_cast<FinishReason>(plan.finished_reasons[i])).second);
    }
    ++steps;
    return plan;
  }
  // Answers the oldest plan: every sampling row yields `token` once (or all of its width); `outcomes` by request id.
  AdvanceResult Advance(int32_t token = 7, const std::map<int64_t, Outcome>& outcomes = {}, bool whole_width = false, int64_t step_us = 0) {
    const ExecutionPlan& plan = *in_flight.front();
    in_flight.pop_front();
    const auto rows = static_cast<size_t>(plan.num_rows());
    const auto width = static_cast<size_t>(scheduler.config().max_row_width);
    std::vector<int32_t> counts(rows), tokens(rows * width, token), codes(rows, 0);
    for (size_t i = 0; i < rows; ++i) {
      const bool extend = static_cast<int32_t>(i) < plan.num_extend_rows;
      if ((plan.flags[i] & kSamples) != 0) counts[i] = extend || !whole_width ? 1 : plan.query_lens[i];
      const auto outcome = outcomes.find(plan.request_ids[i]);
      if (outcome != outcomes.end()) codes[i] = static_cast<int32_t>(outcome->second);
    }
    return Answer(plan.plan_id, counts, tokens, codes, step_us);
  }
  AdvanceResult Answer(int64_t plan_id, const std::vector<int32_t>& counts, const std::vector<int32_t>& tokens,
                       const std::vector<int32_t>& codes, int64_t step_us = 0) {
    AdvanceResult result = scheduler.Advance(plan_id, counts, tokens, codes, step_us);
    scheduler.CheckIntegrity();
    for (size_t i = 0; i < result.finished_ids.size(); ++i) {
      EXPECT_TRUE(finished.emplace(result.finished_ids[i], static_cast<FinishReason>(result.finished_reasons[i])).second);
    }
    return result;
  }
  // One plan and its answer; the plan stays readable.
  const ExecutionPlan& Step(const std::map<int64_t, Outcome>& outcomes = {}) {
    const ExecutionPlan& plan = Plan();
    if (plan.num_rows() > 0) Advance(7, outcomes);
    return plan;
  }
  void Drain(int limit = 10'000) {
    while (scheduler.HasWork()) {
      ASSERT_LT(--limit, 10'000);
      ASSERT_GT(limit, 0) << "the scheduler does not come to an end";
      Step();
    }
  }
  bool Abort(int64_t id, FinishReason reason = FinishReason::kAborted) {
    const bool taken = scheduler.AbortRequest(id, reason) == AbortRefusal::kNone;
    scheduler.CheckIntegrity();
    return taken;
  }
  StateName StateOf(int64_t id) const { return scheduler.InfoOf(id)->state; }
  SchedulerStats Stats() const { return scheduler.Stats(); }
  void ExpectNothingHeld() const {
    const SchedulerStats stats = Stats();
    EXPECT_EQ(stats.pages_active[0], 0);
    EXPECT_EQ(stats.pages_free[0] + stats.pages_cached[0], stats.pages_total[0]);
    EXPECT_EQ(stats.slots_free, scheduler.config().max_num_seqs);
  }

  Scheduler scheduler;
  int64_t now = 0;
  int steps = 0;
  std::deque<const ExecutionPlan*> in_flight;
  std::map<int64_t, FinishReason> finished;
};

// Row of a request in a plan, or -1.
inline int32_t RowOf(const ExecutionPlan& plan, int64_t id) {
  const auto* found = std::find(plan.request_ids.begin(), plan.request_ids.end(), id);
  return found == plan.request_ids.end() ? -1 : static_cast<int32_t>(found - plan.request_ids.begin());
}

}  // namespace tokenspeed

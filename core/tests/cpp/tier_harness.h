// A harness whose transfers wait until a test answers them.
#pragma once

#include "harness.h"

namespace tokenspeed {

struct TierOptions {
  Options base{};
  int32_t host_pages = 64;
  WritePolicy policy = WritePolicy::kThrough;
  bool l3 = false;
  int32_t threshold = 4;
  int64_t timeout_us = 1'000'000;
  bool events = false;
};

inline SchedulerConfig ConfigOf(const TierOptions& options) {
  SchedulerConfig config = ConfigOf(options.base);
  config.groups[0].host_pages = options.host_pages;
  config.write_policy = options.policy;
  config.l3 = options.l3;
  config.prefetch_threshold = options.threshold;
  config.prefetch_timeout_us = options.timeout_us;
  config.kv_events = options.events;
  return config;
}

class TierHarness : public Harness {
 public:
  explicit TierHarness(const TierOptions& options) : Harness(ConfigOf(options)) {}
  explicit TierHarness(const SchedulerConfig& config) : Harness(config) {}

  int32_t in_store = 0;  // leading pages that every lookup finds when all is answered

  // Transfers that plans began and nobody has answered, with their pages.
  std::map<int64_t, int32_t> write_backs, load_backs, lookups, prefetches, stores;

  const ExecutionPlan& Plan() {
    const ExecutionPlan& plan = Harness::Plan();
    Collect(plan.write_back, write_backs);
    Collect(plan.load_back, load_backs);
    Collect(plan.lookup, lookups);
    Collect(plan.prefetch, prefetches);
    Collect(plan.store, stores);
    return plan;
  }
  // Answers every transfer of a kind with all its pages, or with at most `good`.
  void Answer(std::map<int64_t, int32_t>& kind, int32_t good = 1 << 20) {
    std::vector<int64_t> ids;
    std::vector<int32_t> pages;
    for (const auto& [id, count] : kind) {
      ids.push_back(id);
      pages.push_back(std::min(count, good));
    }
    kind.clear();
    scheduler.CacheDone(ids, pages);
    scheduler.CheckIntegrity();
  }
  void AnswerAll() {
    Answer(lookups, in_store);
    for (auto* kind : {&write_backs, &load_backs, &prefetches, &stores}) Answer(*kind);
  }
  const ExecutionPlan& Step(const std::map<int64_t, Outcome>& outcomes = {}) {
    const ExecutionPlan& plan = Plan();
    AnswerAll();
    if (plan.num_rows() > 0) Advance(7, outcomes);
    return plan;
  }
  void Drain() {
    for (int left = 10'000; scheduler.HasWork() || scheduler.cache_ops_pending() > 0; --left) {
      ASSERT_GT(left, 0) << "the scheduler does not come to an end";
      Step();
    }
  }
  // A request of `count` tokens from `first` on, run to its end with one new token.
  void Serve(int64_t id, int32_t first, int32_t count, int64_t max_new = 1) {
    ASSERT_TRUE(Submit(id, Sequence(first, count), max_new).accepted());
    Drain();
  }

 private:
  static void Collect(const TransferColumns& columns, std::map<int64_t, int32_t>& kind) {
    for (const int64_t id : columns.op) ++kind[id];
  }
};

}  // namespace tokenspeed

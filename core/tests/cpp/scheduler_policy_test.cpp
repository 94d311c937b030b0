// Who runs when: shared prefixes in flight, budgets, order, admission, retraction.
#include <algorithm>
#include <vector>

#include "harness.h"

namespace tokenspeed {
namespace {

TEST(InflightSharing, APrefixThatArrivesTogetherIsComputedOnce) {
  Harness h({.page = 64, .pages = 600, .seqs = 16, .budget = 2'048, .model_len = 4'000});
  for (int64_t id = 0; id < 16; ++id) {
    auto tokens = Sequence(0, 1'500);
    for (int32_t i = 0; i < 64; ++i) tokens.push_back(static_cast<int32_t>(10'000 + 100 * id + i));
    h.Submit(id, tokens, 4);
  }
  h.Drain();
  const SchedulerStats stats = h.Stats();
  // 23 full pages of the prefix once, and for each request what is behind them.
  EXPECT_EQ(stats.prefill_tokens, 23 * 64 + 16 * (1'564 - 23 * 64));
  EXPECT_GE(stats.inflight_waits, 15);
  for (int64_t id = 1; id < 16; ++id) EXPECT_EQ(h.scheduler.InfoOf(id)->cached_tokens, 23 * 64);
}

TEST(InflightSharing, EachLaterRequestHitsEveryFullPage) {
  Harness h({.page = 64, .pages = 600, .seqs = 16, .budget = 512, .model_len = 4'000});
  for (int64_t id = 0; id < 16; ++id) {
    auto tokens = Sequence(0, 1'500);
    for (int32_t i = 0; i < 64; ++i) tokens.push_back(static_cast<int32_t>(10'000 + 100 * id + i));
    h.Submit(id, tokens, 4);
    h.Drain();
    EXPECT_EQ(h.scheduler.InfoOf(id)->cached_tokens, id == 0 ? 0 : 23 * 64);
  }
}

TEST(InflightSharing, AWaiterTakesOverWhenTheOwnerIsAborted) {
  Harness h({.pages = 64, .budget = 8});
  h.Submit(1, Sequence(0, 40), 4);
  h.Submit(2, Sequence(0, 40), 4);
  h.Submit(3, Sequence(0, 40), 4);
  h.Step();
  h.Plan();  // the budget is used up by 1; 2 and 3 are looked at when it is not
  h.Advance();
  EXPECT_TRUE(h.Abort(1));
  const ExecutionPlan& plan = h.Plan();
  const int32_t row = RowOf(plan, 2);
  ASSERT_GE(row, 0);
  EXPECT_EQ(plan.context_lens[static_cast<size_t>(row)], 16);  // what 1 had published
  h.Advance();
  h.Drain();
  EXPECT_EQ(h.finished.at(2), FinishReason::kLength);
  EXPECT_EQ(h.finished.at(3), FinishReason::kLength);
}

TEST(InflightSharing, AParkedRequestCanBeAbortedAndDoesNotHoldUpOthers) {
  Harness h({.pages = 64, .budget = 40});
  h.Submit(1, Sequence(0, 30), 4);
  h.Submit(2, Sequence(0, 30), 4);
  h.Submit(3, Sequence(500, 5), 4);
  const ExecutionPlan& plan = h.Plan();
  EXPECT_EQ(RowOf(plan, 2), -1);
  EXPECT_GE(RowOf(plan, 3), 0);
  EXPECT_EQ(h.Stats().parked, 1);
  EXPECT_TRUE(h.Abort(2));
  EXPECT_EQ(h.Stats().parked, 0);
  h.Advance();
  h.Drain();
}

TEST(Budget, ALongPromptNeverOpensAGapBetweenDecodes) {
  // Budget 256 and a prompt of 3,000 tokens among 8 decodes: every step has all eight, and never more than 256 tokens.
  Harness h({.page = 16, .pages = 1'000, .seqs = 16, .budget = 256, .model_len = 8'000});
  for (int64_t id = 0; id < 8; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 20), 200);
  h.Step();
  h.Submit(99, Sequence(5'000, 3'000), 10);
  int chunks = 0;
  while (!h.finished.contains(99)) {
    const ExecutionPlan& plan = h.Step();
    EXPECT_LE(plan.num_tokens(), 256);
    for (int64_t id = 0; id < 8; ++id) EXPECT_GE(RowOf(plan, id), 0);
    chunks += plan.num_extend_rows;
  }
  EXPECT_EQ(chunks, (3'000 + 247) / 248);
}

TEST(Budget, ManyDecodesLeaveAPageToWaitingPrompts) {
  Harness h({.page = 4, .pages = 200, .seqs = 12, .budget = 8, .model_len = 400});
  for (int64_t id = 0; id < 10; ++id) h.Submit(id, Sequence(static_cast<int32_t>(50 * id), 3), 60);
  while (h.scheduler.NumRunning() < 10) h.Step();
  h.Submit(99, Sequence(900, 20), 1);
  int waited = 0;
  while (!h.finished.contains(99) && waited < 50) {
    EXPECT_LE(h.Step().num_tokens(), h.scheduler.config().max_step_tokens());
    ++waited;
  }
  EXPECT_LE(waited, 6);
}

TEST(Budget, MaxStepTimeBoundsThePrefillShareOnceItIsMeasured) {
  SchedulerConfig config = ConfigOf({.page = 4, .pages = 2'000, .seqs = 4, .budget = 1'000, .model_len = 8'000});
  config.max_step_us = 10'000;
  Harness h(config);
  h.Submit(1, Sequence(0, 3), 1'000);
  h.Plan();
  h.Advance(7, {}, false, 2'000);
  h.Submit(2, Sequence(5'000, 4'000), 1);
  int32_t last = 0;
  for (int i = 0; i < 12; ++i) {
    const ExecutionPlan& plan = h.Plan();
    const int32_t prefill = plan.num_tokens() - 1;
    h.Advance(7, {}, false, prefill > 0 ? 2'000 + 100 * prefill : 2'000);  // 2 ms of decode, 100 us a prompt token
    last = prefill;
  }
  EXPECT_GT(last, 60);
  EXPECT_LE(last, 85);
}

// A scheduler with a bound of 10 ms that has learnt that decodes take 2 ms and a prompt token 100 us: 80 tokens fit.
SchedulerConfig BoundedConfig(int32_t seqs, int32_t pages) {
  SchedulerConfig config = ConfigOf({.page = 4, .pages = pages, .seqs = seqs, .budget = 1'000, .model_len = 8'000});
  config.max_step_us = 10'000;
  return config;
}
// The prompt tokens of each of `steps` plans.
std::vector<int32_t> PromptTokens(Harness& h, int steps) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < steps; ++i) {
    const ExecutionPlan& plan = h.Plan();
    const int32_t decodes = plan.num_rows() - plan.num_extend_rows;
    tokens.push_back(plan.num_tokens() - decodes);
    h.Advance(7, {}, false, 2'000 + 100 * h.scheduler.config().FilledStep(tokens.back()));
  }
  return tokens;
}
void LearnSteps(Harness& h) {
  h.Submit(1, Sequence(0, 3), 7'000);
  (void)PromptTokens(h, 4);
  h.Submit(2, Sequence(5'000, 1'500), 1);
  while (!h.finished.contains(2)) (void)PromptTokens(h, 1);
}

TEST(Budget, ACrowdOfPromptsWidensTheBoundAndAFewDoNot) {
  for (const int32_t prompts : {1, 4, 8, 16}) {
    Harness h(BoundedConfig(32, 4'000));
    LearnSteps(h);
    for (int32_t id = 0; id < prompts; ++id) h.Submit(10 + id, Sequence(10'000 * (id + 1), 800), 1);
    const double bound_us = 10'000 * std::max(1.0, prompts / 4.0);
    (void)PromptTokens(h, 2);  // it tries at most twice what it has tried
    EXPECT_NEAR(PromptTokens(h, 1)[0], (bound_us - 2'000) / 100, 6.0) << prompts;
  }
}

TEST(Budget, PromptsThatCannotRunDoNotWidenTheBound) {
  Harness slots(BoundedConfig(2, 4'000));
  LearnSteps(slots);
  for (int32_t id = 0; id < 30; ++id) slots.Submit(10 + id, Sequence(10'000 * (id + 1), 800), 1);
  for (const int32_t tokens : PromptTokens(slots, 6)) EXPECT_LE(tokens, 86);

  Harness pages(BoundedConfig(32, 1'000));
  LearnSteps(pages);
  for (int32_t id = 0; id < 30; ++id) pages.Submit(10 + id, Sequence(10'000 * (id + 1), 3'200), 1);
  (void)PromptTokens(pages, 3);  // one is admitted, and then nobody
  for (const int32_t tokens : PromptTokens(pages, 6)) EXPECT_LE(tokens, 86);
}

TEST(Budget, StepsUnderABoundAreCutToTheSizesThatTheDeviceFills) {
  SchedulerConfig config = BoundedConfig(8, 4'000);
  config.step_sizes = {16, 32, 64, 96, 128};
  Harness h(config);
  LearnSteps(h);
  h.Submit(10, Sequence(10'000, 250), 1);
  h.Submit(11, Sequence(20'000, 100), 1);
  EXPECT_EQ(PromptTokens(h, 6), (std::vector<int32_t>{64, 64, 64, 64, 64, 30}));
}

// Steps among 8 decodes until a prompt of 3,000 tokens has its first: 42 ms of decodes, 3.7 ms a prompt token, and as much again for
// 4,800 tokens that it attends to. The longest, in milliseconds; `chunks`: how many.
double LongestStep(Harness& h, int64_t id, int& chunks) {
  double longest = 0.0;
  chunks = 0;
  h.Submit(id, Sequence(static_cast<int32_t>(10'000 * id), 3'000), 1);
  while (!h.finished.contains(id)) {
    const ExecutionPlan& plan = h.Plan();
    double ms = 42.0;
    for (int32_t row = 0; row < plan.num_extend_rows; ++row) {
      const auto i = static_cast<size_t>(row);
      ms += 3.7 * (plan.query_lens[i] + PrefillCost::Attended(plan.query_lens[i], plan.context_lens[i]) / 4'800);
    }
    EXPECT_EQ(plan.num_rows() - plan.num_extend_rows, 8);
    chunks += plan.num_extend_rows;
    longest = std::max(longest, ms);
    h.Advance(7, {}, false, static_cast<int64_t>(1'000 * ms));
  }
  return longest;
}

TEST(Budget, ChunksBehindALongContextAreCutToTheTimeOfAFirstChunk) {
  Harness h({.page = 16, .pages = 2'000, .seqs = 16, .budget = 256, .model_len = 8'000});
  for (int64_t id = 0; id < 8; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 20), 7'000);
  h.Step();
  for (int i = 0; i < 4; ++i) {
    h.Plan();
    h.Advance(7, {}, false, 42'000);
  }
  const double plain = 42.0 + 3.7 * (248 + PrefillCost::Attended(248, 0) / 4'800);
  int chunks = 0;
  EXPECT_LE(LongestStep(h, 10, chunks), 1.3 * plain);  // it learns from the first chunks of the first prompt
  for (int64_t id = 11; id < 14; ++id) (void)LongestStep(h, id, chunks);
  EXPECT_LE(LongestStep(h, 14, chunks), 1.06 * plain);
  EXPECT_LE(chunks, 17);  // 13 by tokens alone
}

TEST(Budget, ALongPromptAloneIsNeverCutBelowTheBudget) {
  Harness h({.page = 16, .pages = 2'000, .seqs = 16, .budget = 256, .model_len = 8'000});
  for (int64_t id = 0; id < 8; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 20), 40);
  h.Step();
  int chunks = 0;
  (void)LongestStep(h, 10, chunks);
  ASSERT_GT(h.Stats().context_weight, 0.0);
  h.Drain();
  h.Submit(11, Sequence(200'000, 3'000), 1);
  int steps = 0;
  while (!h.finished.contains(11)) {
    h.Step();
    ++steps;
  }
  EXPECT_EQ(steps, (3'000 + 255) / 256);
}

TEST(Budget, ACutChunkLeavesNothingToAnotherPromptInThatStep) {
  Harness h({.page = 16, .pages = 2'000, .seqs = 16, .budget = 256, .model_len = 8'000});
  for (int64_t id = 0; id < 8; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 20), 7'000);
  h.Step();
  int chunks = 0;
  for (int64_t id = 10; id < 14; ++id) (void)LongestStep(h, id, chunks);
  h.Submit(20, Sequence(300'000, 3'000), 1);
  h.Submit(21, Sequence(400'000, 3'000), 1);
  while (!h.finished.contains(20)) {
    const ExecutionPlan& plan = h.Step();
    const bool last = h.finished.contains(20);
    EXPECT_EQ(plan.num_extend_rows, last ? 2 : 1);
  }
}

TEST(Order, PriorityThenArrivalAndNeverTheId) {
  Harness h({.pages = 64, .seqs = 1, .budget = 64});
  h.Submit(50, Sequence(0, 5), 1);
  auto low = h.Spec(1, Sequence(100, 5), 1);
  low.priority = 3;
  auto high = h.Spec(90, Sequence(200, 5), 1);
  high.priority = -3;
  h.Submit(low);
  h.Submit(30, Sequence(300, 5), 1);
  h.Submit(high);
  std::vector<int64_t> order;
  while (h.scheduler.HasWork()) order.push_back(h.Step().request_ids[0]);
  EXPECT_EQ(order, (std::vector<int64_t>{90, 50, 30, 1}));
}

TEST(Order, HitsGoFirstInsideTheWindow) {
  Harness h({.pages = 64, .seqs = 1, .budget = 64});
  h.Submit(1, Sequence(0, 20), 1);
  h.Drain();
  h.Submit(2, Sequence(500, 20), 1);
  h.Submit(3, Sequence(0, 20), 1);
  EXPECT_EQ(h.Step().request_ids[0], 3);
  EXPECT_EQ(h.Step().request_ids[0], 2);
}

TEST(Order, AnUrgentArrivalDoesNotWaitBehindALongPrompt) {
  Harness h({.pages = 200, .seqs = 4, .budget = 8});
  h.Submit(1, Sequence(0, 100), 1);
  h.Step();
  auto urgent = h.Spec(2, Sequence(500, 6), 1);
  urgent.priority = -5;
  h.Submit(urgent);
  const ExecutionPlan& plan = h.Step();
  EXPECT_EQ(plan.request_ids[0], 2);
  EXPECT_TRUE(h.finished.contains(2));
  h.Drain();
}

TEST(Admission, ExpectsWhatWasObservedNotTheWorstCase) {
  // 20 pages. Prompts of one page with max_new_tokens 60: the worst case is 16 pages each, so one at a time.
  const auto running_after = [](AdmissionRule rule) {
    SchedulerConfig config = ConfigOf({.pages = 20, .seqs = 8, .budget = 64});
    config.admission = rule;
    Harness h(config);
    for (int64_t id = 0; id < 12; ++id) {  // each stops after two tokens
      h.Submit(100 + id, Sequence(static_cast<int32_t>(1'000 + 10 * id), 3), 60);
      h.Step();
      h.Step({{100 + id, Outcome::kFinish}});
    }
    for (int64_t id = 0; id < 8; ++id) h.Submit(id, Sequence(static_cast<int32_t>(10 * id), 3), 60);
    h.Step();
    return h.scheduler.NumRunning();
  };
  EXPECT_EQ(running_after(AdmissionRule::kWholeOutput), 1);
  EXPECT_GE(running_after(AdmissionRule::kExpectedOutput), 6);
}

TEST(Retraction, TakesTheCheapestToRestoreAndSparesSharedPages) {
  // Request 2 shares almost all with request 1; request 3 has as many tokens of its own. Taking 2 costs the least to undo.
  SchedulerConfig config = ConfigOf({.pages = 17, .seqs = 3, .budget = 64});
  Harness h(config);
  h.Submit(100, {1}, 1);
  h.Drain();
  h.Submit(1, Sequence(0, 22), 60);
  h.Step();
  auto own = Sequence(500, 22);
  h.Submit(3, own, 60);
  h.Step();
  auto shared = Sequence(0, 22);
  shared.back() = 77;
  h.Submit(2, shared, 60);
  std::vector<int64_t> retracted;
  while (h.scheduler.HasWork() && retracted.empty()) {
    const ExecutionPlan& plan = h.Step();
    retracted.assign(plan.retracted_ids.begin(), plan.retracted_ids.end());
  }
  ASSERT_FALSE(retracted.empty());
  EXPECT_EQ(retracted[0], 2);
  h.Drain();
}

TEST(Retraction, TheLessImportantGoesFirst) {
  Harness h({.pages = 12, .seqs = 3, .budget = 64});
  h.Submit(100, {1}, 1);
  h.Drain();
  h.Submit(1, Sequence(0, 13), 30);
  auto unimportant = h.Spec(2, Sequence(100, 14), 30);  // dearer to restore than 3
  unimportant.priority = 9;
  h.Submit(unimportant);
  h.Submit(3, Sequence(200, 12), 30);
  std::vector<int64_t> retracted;
  while (h.scheduler.HasWork() && retracted.empty()) {
    const ExecutionPlan& plan = h.Step();
    retracted.assign(plan.retracted_ids.begin(), plan.retracted_ids.end());
  }
  ASSERT_FALSE(retracted.empty());
  EXPECT_EQ(retracted[0], 2);
  h.Drain();
}

TEST(Retraction, ResumesByMatchingWhatIsStillCached) {
  Harness h({.pages = 14, .seqs = 2, .budget = 64});
  h.Submit(100, {1}, 1);
  h.Drain();
  h.Submit(1, Sequence(0, 17), 20);
  h.Submit(2, Sequence(100, 17), 20);
  while (h.scheduler.InfoOf(2)->retractions == 0) h.Step();
  const int32_t made = h.scheduler.InfoOf(2)->output_tokens;
  const int64_t prefill_before = h.Stats().prefill_tokens;
  while (h.StateOf(2) != StateName::kDecoding && h.StateOf(2) != StateName::kFinished) h.Step();
  EXPECT_LT(h.Stats().prefill_tokens - prefill_before, 17 + made);
  EXPECT_GT(h.scheduler.InfoOf(2)->retracted_us, 0);
  h.Drain();
  EXPECT_EQ(h.scheduler.InfoOf(2)->output_tokens, 20);
}

}  // namespace
}  // namespace tokenspeed

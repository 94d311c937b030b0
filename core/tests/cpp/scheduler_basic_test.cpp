// Plans of one and of several requests, prefix reuse, and refusals.
#include <set>

#include "harness.h"

namespace tokenspeed {
namespace {

std::vector<int32_t> ToVector(const Column<int32_t>& column) { return {column.begin(), column.end()}; }

TEST(SchedulerBasic, OneRequestFromPromptToLength) {
  Harness h({.budget = 6});
  ASSERT_TRUE(h.Submit(1, Sequence(10, 10), 3).accepted());
  const ExecutionPlan& first = h.Plan();
  EXPECT_EQ(first.mode, ForwardMode::kExtend);
  EXPECT_EQ(ToVector(first.input_ids), Sequence(10, 6));
  EXPECT_EQ(first.flags[0], kNewInSlot);
  EXPECT_EQ(first.context_lens[0], 0);
  EXPECT_EQ(ToVector(first.delta_index), (std::vector<int32_t>{0, 1}));
  h.Advance();
  const ExecutionPlan& second = h.Plan();
  EXPECT_EQ(ToVector(second.input_ids), Sequence(16, 4));
  EXPECT_EQ(second.context_lens[0], 6);
  EXPECT_EQ(second.flags[0], kSamples);
  EXPECT_EQ(ToVector(second.delta_index), (std::vector<int32_t>{2}));
  h.Advance(70);
  const ExecutionPlan& third = h.Plan();
  EXPECT_EQ(third.mode, ForwardMode::kDecode);
  EXPECT_EQ(ToVector(third.input_ids), (std::vector<int32_t>{70}));
  EXPECT_EQ(third.context_lens[0], 10);
  EXPECT_EQ(third.output_lens[0], 1);
  EXPECT_TRUE(third.delta_page.empty());  // the page has room
  h.Advance(71);
  h.Step();
  EXPECT_EQ(h.finished.at(1), FinishReason::kLength);
  EXPECT_FALSE(h.scheduler.HasWork());
  EXPECT_EQ(h.Plan().mode, ForwardMode::kIdle);
  h.ExpectNothingHeld();
}

TEST(SchedulerBasic, StopEndsAtOnceAndKeepsTheToken) {
  Harness h;
  h.Submit(1, Sequence(0, 5), 100);
  h.Step();
  h.Step({{1, Outcome::kFinish}});
  EXPECT_EQ(h.finished.at(1), FinishReason::kStop);
  EXPECT_EQ(h.scheduler.InfoOf(1)->output_tokens, 2);
  h.ExpectNothingHeld();
}

TEST(SchedulerBasic, TheModelLengthIsALimit) {
  Harness h({.model_len = 8});
  h.Submit(1, Sequence(0, 6), 100);
  h.Drain();
  EXPECT_EQ(h.finished.at(1), FinishReason::kLength);
  EXPECT_EQ(h.scheduler.InfoOf(1)->output_tokens, 2);
}

TEST(SchedulerBasic, ExtendsStandBeforeDecodesInAMixedStep) {
  Harness h({.budget = 8});
  h.Submit(1, Sequence(0, 5), 50);
  h.Step();
  h.Submit(2, Sequence(100, 20), 50);
  const ExecutionPlan& plan = h.Plan();
  EXPECT_EQ(plan.mode, ForwardMode::kMixed);
  EXPECT_EQ(plan.num_extend_rows, 1);
  EXPECT_EQ(RowOf(plan, 2), 0);
  EXPECT_EQ(RowOf(plan, 1), 1);
  EXPECT_EQ(plan.num_tokens(), 8);
  EXPECT_EQ(plan.query_lens[0], 7);  // the decode comes first out of the budget
}

TEST(SchedulerBasic, APrefixIsReusedAndReported) {
  Harness h;
  h.Submit(1, Sequence(0, 14), 1);
  h.Drain();
  h.Submit(2, Sequence(0, 14), 1);
  const ExecutionPlan& plan = h.Plan();
  EXPECT_EQ(plan.context_lens[0], 12);
  EXPECT_EQ(plan.query_lens[0], 2);
  EXPECT_EQ(plan.delta_page.size(), 4U);  // three found, one new
  EXPECT_EQ(h.scheduler.InfoOf(2)->cached_tokens, 12);
  EXPECT_EQ(h.Stats().prefix_hit_tokens, 12);
  EXPECT_EQ(h.Stats().prompt_tokens_queried, 28);
  h.Advance();
}

TEST(SchedulerBasic, OutputPagesAreReusedByTheNextTurn) {
  Harness h;
  h.Submit(1, Sequence(0, 6), 7);
  h.Drain();  // 13 tokens, 12 of them with KV: three full pages, with output in two
  auto turn = Sequence(0, 6);
  turn.insert(turn.end(), 7, 7);
  turn.insert(turn.end(), {50, 51, 52});
  h.Submit(2, turn, 1);
  EXPECT_EQ(h.Plan().context_lens[0], 12);
  h.Advance();
}

TEST(SchedulerBasic, SaltAdapterAndExtraKeysKeepPromptsApart) {
  Harness h;
  h.Submit(1, Sequence(0, 14), 1);
  h.Drain();
  auto salted = h.Spec(2, Sequence(0, 14), 1);
  salted.salt = "tenant";
  auto adapted = h.Spec(3, Sequence(0, 14), 1);
  adapted.adapter = 5;
  auto image = h.Spec(4, Sequence(0, 14), 1);
  image.extra_keys = {{5, {9}}};
  for (const auto& spec : {salted, adapted, image}) {
    h.Submit(spec);
    h.Drain();
  }
  EXPECT_EQ(h.scheduler.InfoOf(2)->cached_tokens, 0);
  EXPECT_EQ(h.scheduler.InfoOf(3)->cached_tokens, 0);
  EXPECT_EQ(h.scheduler.InfoOf(4)->cached_tokens, 4);  // the page before the image is shared
}

TEST(SchedulerBasic, AnExtraKeyInThePageThatOutputFillsCounts) {
  Harness h;
  auto image = h.Spec(1, Sequence(0, 6), 3);
  image.extra_keys = {{5, {9}}};
  h.Submit(image);
  h.Drain();
  auto turn = Sequence(0, 6);
  turn.insert(turn.end(), {7, 7, 1});
  h.Submit(2, turn, 1);  // the same tokens without the image
  h.Drain();
  EXPECT_EQ(h.scheduler.InfoOf(2)->cached_tokens, 4);
  auto same = h.Spec(3, turn, 1);
  same.extra_keys = {{5, {9}}};
  h.Submit(same);
  h.Drain();
  EXPECT_EQ(h.scheduler.InfoOf(3)->cached_tokens, 8);
}

TEST(SchedulerBasic, MaxReuseTokensBoundsTheHit) {
  Harness h;
  h.Submit(1, Sequence(0, 14), 1);
  h.Drain();
  for (const auto& [bound, hit] : {std::pair{0, 0}, {7, 4}, {-1, 12}}) {
    auto spec = h.Spec(10 + bound, Sequence(0, 14), 1);
    spec.max_reuse_tokens = bound;
    h.Submit(spec);
    h.Drain();
    EXPECT_EQ(h.scheduler.InfoOf(10 + bound)->cached_tokens, hit) << bound;
  }
}

TEST(SchedulerBasic, WithoutPrefixCachingNothingIsKept) {
  SchedulerConfig config = ConfigOf({});
  config.enable_prefix_caching = false;
  Harness h(config);
  for (int64_t id = 1; id <= 2; ++id) {
    h.Submit(id, Sequence(0, 14), 6);
    h.Drain();
    EXPECT_EQ(h.scheduler.InfoOf(id)->cached_tokens, 0);
  }
  EXPECT_EQ(h.Stats().pages_free[0], 64);
}

TEST(SchedulerBasic, FlushDropsWhatNobodyUses) {
  Harness h;
  h.Submit(1, Sequence(0, 14), 1);
  h.Drain();
  h.Submit(2, Sequence(50, 6), 10);
  h.Step();
  EXPECT_EQ(h.scheduler.FlushCache(), 3);
  h.scheduler.CheckIntegrity();
  EXPECT_EQ(h.Stats().pages_cached[0], 0);
  EXPECT_EQ(h.Stats().pages_active[0], 2);
  h.Drain();
}

TEST(SchedulerBasic, DecodesStandInTreeOrderWithIntervals) {
  Harness h({.pages = 128, .seqs = 6, .budget = 200});
  auto with = [](int32_t tail) {
    auto tokens = Sequence(0, 8);
    tokens.insert(tokens.end(), 6, tail);
    return tokens;
  };
  h.Submit(1, with(100), 20);
  h.Submit(2, Sequence(900, 9), 20);
  h.Step();  // 1 and 2 are computed
  h.Submit(3, with(101), 20);
  h.Submit(4, with(100), 20);
  h.Step();
  const ExecutionPlan& plan = h.Plan();
  ASSERT_EQ(plan.num_rows(), 4);
  ASSERT_EQ(plan.prefix_intervals.size(), 2U);
  const PrefixInterval outer = plan.prefix_intervals[0], inner = plan.prefix_intervals[1];
  EXPECT_EQ(outer.row_end - outer.row_begin, 3);
  EXPECT_EQ(outer.pages, 2);
  EXPECT_EQ(inner.row_end - inner.row_begin, 2);
  EXPECT_EQ(inner.first_page, 2);
  EXPECT_EQ(inner.pages, 1);
  const std::set<int64_t> in_inner{plan.request_ids[static_cast<size_t>(inner.row_begin)],
                                   plan.request_ids[static_cast<size_t>(inner.row_begin) + 1]};
  EXPECT_EQ(in_inner, (std::set<int64_t>{1, 4}));
  h.Advance();
}

TEST(SchedulerBasic, RefusesEachBadRequestAloneWithAReason) {
  Harness h({.pages = 10, .model_len = 60});
  h.Submit(1, Sequence(0, 5), 50);
  std::vector<std::pair<RequestSpec, SubmitRefusal>> bad;
  bad.emplace_back(h.Spec(1, Sequence(0, 5)), SubmitRefusal::kDuplicateId);
  bad.emplace_back(h.Spec(2, {}), SubmitRefusal::kEmptyPrompt);
  bad.emplace_back(h.Spec(2, {1, -3}), SubmitRefusal::kBadToken);
  bad.emplace_back(h.Spec(2, {1}, 0), SubmitRefusal::kBadMaxNewTokens);
  bad.emplace_back(h.Spec(2, Sequence(0, 60)), SubmitRefusal::kTooLong);
  bad.emplace_back(h.Spec(2, Sequence(0, 41)), SubmitRefusal::kNeverFits);
  auto key = h.Spec(2, {1, 2});
  key.extra_keys = {{2, {}}};
  bad.emplace_back(key, SubmitRefusal::kBadExtraKey);
  auto priority = h.Spec(2, {1});
  priority.priority = int64_t{1} << 40;
  bad.emplace_back(priority, SubmitRefusal::kBadPriority);
  auto reuse = h.Spec(2, {1});
  reuse.max_reuse_tokens = -2;
  bad.emplace_back(reuse, SubmitRefusal::kBadMaxReuse);
  std::vector<RequestSpec> specs;
  for (const auto& [spec, refusal] : bad) specs.push_back(spec);
  specs.push_back(h.Spec(3, {5}, 1));
  const auto results = h.scheduler.SubmitRequests(specs, 0);
  for (size_t i = 0; i < bad.size(); ++i) {
    EXPECT_EQ(results[i].refusal, bad[i].second) << i;
    EXPECT_FALSE(results[i].reason.empty());
  }
  EXPECT_TRUE(results.back().accepted());
  EXPECT_EQ(h.Stats().refused, static_cast<int64_t>(bad.size()));
  h.Drain();
  EXPECT_EQ(h.finished.size(), 2U);
}

TEST(SchedulerBasic, ABadResultEndsItsRowAlone) {
  Harness h;
  h.Submit(1, Sequence(0, 5), 50);
  h.Submit(2, Sequence(50, 5), 50);
  h.Step();
  const ExecutionPlan& plan = h.Plan();
  const int32_t bad = RowOf(plan, 1);
  std::vector<int32_t> counts{1, 1};
  counts[static_cast<size_t>(bad)] = 2;
  h.in_flight.pop_front();
  const AdvanceResult result = h.Answer(plan.plan_id, counts, {7, 7}, {0, 0});
  EXPECT_EQ(result.row_refusals[static_cast<size_t>(bad)], static_cast<int32_t>(RowRefusal::kBadCount));
  EXPECT_EQ(h.finished.at(1), FinishReason::kFailed);
  EXPECT_EQ(h.StateOf(2), StateName::kDecoding);
}

TEST(SchedulerBasic, AFailedRowIsNeitherCachedNorContagious) {
  Harness h({.budget = 100});
  h.Submit(1, Sequence(0, 13), 5);
  h.Step({{1, Outcome::kFail}});
  EXPECT_EQ(h.finished.at(1), FinishReason::kFailed);
  EXPECT_EQ(h.Stats().failed, 1);
  EXPECT_EQ(h.Stats().pages_cached[0], 0);  // what a failed step wrote may be poison
  h.ExpectNothingHeld();
}

TEST(SchedulerBasic, MisuseOfACallChangesNothing) {
  Harness h;
  h.Submit(1, Sequence(0, 5), 5);
  const ExecutionPlan& plan = h.Plan();
  EXPECT_THROW((void)h.scheduler.NextExecutionPlan(5), std::invalid_argument);
  const std::vector<int32_t> one{1}, two{1, 1}, zero{0};
  EXPECT_THROW(h.scheduler.Advance(plan.plan_id + 1, one, one, zero), std::invalid_argument);
  EXPECT_THROW(h.scheduler.Advance(plan.plan_id, two, one, zero), std::invalid_argument);
  EXPECT_THROW(h.scheduler.Advance(plan.plan_id, one, two, zero), std::invalid_argument);
  h.scheduler.CheckIntegrity();
  h.Advance();
  EXPECT_THROW(h.scheduler.Advance(plan.plan_id, one, one, zero), std::invalid_argument);
  EXPECT_EQ(h.StateOf(1), StateName::kDecoding);
}

TEST(SchedulerBasic, AnEndThatNobodyWasToldOfBlocksItsId) {
  SchedulerConfig config = ConfigOf({});
  config.finished_history = 0;
  Harness h(config);
  h.Submit(1, {1, 2}, 5);
  EXPECT_TRUE(h.Abort(1));
  EXPECT_EQ(h.Submit(1, {1, 2}, 5).refusal, SubmitRefusal::kDuplicateId);
  h.Plan();
  EXPECT_EQ(h.finished.at(1), FinishReason::kAborted);
  EXPECT_TRUE(h.Submit(1, {1, 2}, 5).accepted());
  EXPECT_FALSE(h.scheduler.InfoOf(2).has_value());
}

TEST(SchedulerBasic, TheSameCallsGiveTheSamePlans) {
  const auto run = [] {
    std::vector<int32_t> trace;
    Harness h({.pages = 24, .budget = 10});
    for (int64_t id = 0; id < 9; ++id) h.Submit(1'000 - id * 7, Sequence(static_cast<int32_t>(id % 3) * 50, 9), 12);
    while (h.scheduler.HasWork()) {
      const ExecutionPlan& plan = h.Step();
      for (const auto& column : {&plan.slots, &plan.input_ids, &plan.delta_page, &plan.context_lens}) {
        trace.insert(trace.end(), column->begin(), column->end());
      }
    }
    return trace;
  };
  EXPECT_EQ(run(), run());
}

}  // namespace
}  // namespace tokenspeed

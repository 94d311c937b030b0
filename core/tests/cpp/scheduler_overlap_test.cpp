// A plan taken before the one in flight is advanced, rows of several tokens, and ends with a step in flight.
#include "harness.h"

namespace tokenspeed {
namespace {

TEST(SchedulerOverlap, TheNextPlanReadsItsInputOnTheDevice) {
  Harness h({.overlap = 1});
  h.Submit(1, Sequence(0, 5), 10);
  h.Plan();
  const ExecutionPlan& second = h.Plan();
  EXPECT_EQ(second.mode, ForwardMode::kDecode);
  EXPECT_EQ(second.input_ids[0], kUnknownToken);
  EXPECT_EQ(second.context_lens[0], 5);
  EXPECT_EQ(second.output_lens[0], 1);
  EXPECT_EQ(h.StateOf(1), StateName::kPrefillDone);
  EXPECT_THROW((void)h.scheduler.NextExecutionPlan(9), std::invalid_argument);
  h.Advance(40);
  EXPECT_EQ(h.StateOf(1), StateName::kDecoding);
  h.Advance(41);
  EXPECT_EQ(h.Plan().input_ids[0], 41);  // nothing in flight: known
}

TEST(SchedulerOverlap, NoRowIsPlannedPastTheLimit) {
  Harness h({.overlap = 1});
  h.Submit(1, Sequence(0, 5), 2);
  h.Plan();
  h.Plan();
  h.Advance();
  EXPECT_EQ(h.Plan().mode, ForwardMode::kIdle);  // two tokens are under way already
  h.Advance();
  EXPECT_EQ(h.finished.at(1), FinishReason::kLength);
}

TEST(SchedulerOverlap, AStopLeavesTheStepInFlightItsPages) {
  Harness h({.overlap = 1});
  h.Submit(1, Sequence(0, 5), 10);
  h.Plan();
  h.Plan();
  h.Advance(7, {{1, Outcome::kFinish}});
  EXPECT_EQ(h.finished.at(1), FinishReason::kStop);  // told at once
  EXPECT_EQ(h.StateOf(1), StateName::kDraining);
  EXPECT_GT(h.Stats().pages_active[0], 0);
  EXPECT_FALSE(h.Abort(1));
  const AdvanceResult late = h.Advance();
  EXPECT_EQ(late.row_refusals[0], static_cast<int32_t>(RowRefusal::kLate));
  EXPECT_TRUE(late.finished_ids.empty());
  EXPECT_EQ(h.scheduler.InfoOf(1)->output_tokens, 1);
  h.ExpectNothingHeld();
}

TEST(SchedulerOverlap, AnAbortWaitsForTheStepInFlight) {
  Harness h({.overlap = 1});
  h.Submit(1, Sequence(0, 9), 10);
  h.Plan();
  EXPECT_TRUE(h.Abort(1));
  EXPECT_FALSE(h.Abort(1));
  EXPECT_EQ(h.StateOf(1), StateName::kAborting);
  EXPECT_EQ(h.Stats().pages_active[0], 3);
  EXPECT_EQ(h.Plan().mode, ForwardMode::kIdle);
  EXPECT_TRUE(h.finished.empty());
  h.Advance();
  EXPECT_EQ(h.finished.at(1), FinishReason::kAborted);
  h.ExpectNothingHeld();
  EXPECT_EQ(h.Stats().pages_cached[0], 0);
}

TEST(SchedulerOverlap, AReplacedPageOutlivesTheStepThatReadsIt) {
  Harness h({.budget = 100, .overlap = 1});
  auto first = h.Spec(1, Sequence(0, 8), 30);
  auto second = h.Spec(2, Sequence(0, 8), 30);
  first.max_reuse_tokens = second.max_reuse_tokens = 0;  // both compute everything
  h.Submit(first);
  h.Submit(second);
  h.Plan();
  h.Plan();
  EXPECT_EQ(h.Stats().pages_active[0], 6);  // two pages each, and one more each for the decode
  h.Advance();
  EXPECT_EQ(h.Stats().pages_active[0], 6);  // the twins are read by the second step
  const ExecutionPlan& third = h.Plan();
  EXPECT_EQ(third.delta_page.size(), 2U);
  ASSERT_EQ(third.prefix_intervals.size(), 1U);
  EXPECT_EQ(third.prefix_intervals[0].pages, 2);
  h.Advance();
  EXPECT_EQ(h.Stats().pages_active[0], 4);
}

TEST(SchedulerWidth, WhatWasNotAcceptedGivesItsPagesBack) {
  Harness h({.width = 4});
  h.Submit(1, Sequence(0, 7), 20);
  h.Step();
  const ExecutionPlan& plan = h.Plan();
  EXPECT_EQ(plan.query_lens[0], 4);
  EXPECT_EQ(plan.input_ids[1], kUnknownToken);
  EXPECT_EQ(h.Stats().pages_active[0], 3);
  h.Advance();  // one of four
  EXPECT_EQ(h.Stats().pages_active[0], 2);
  EXPECT_EQ(h.Plan().context_lens[0], 8);
  h.Advance(7, {}, true);  // all four
  EXPECT_EQ(h.Plan().context_lens[0], 12);
  EXPECT_EQ(h.scheduler.InfoOf(1)->output_tokens, 6);
}

TEST(SchedulerWidth, TheLastRowIsNoWiderThanTheLimit) {
  Harness h({.width = 4});
  h.Submit(1, Sequence(0, 7), 3);
  h.Step();
  EXPECT_EQ(h.Plan().query_lens[0], 2);
  h.Advance(7, {}, true);
  EXPECT_EQ(h.finished.at(1), FinishReason::kLength);
}

TEST(SchedulerWidth, UnderOverlapLengthsAreUpperBounds) {
  Harness h({.width = 3, .overlap = 1});
  h.Submit(1, Sequence(0, 7), 30);
  h.Plan();
  h.Plan();
  h.Advance();
  const ExecutionPlan& plan = h.Plan();
  EXPECT_EQ(plan.context_lens[0], 7 + 3);  // if all of the row in flight is accepted
  EXPECT_EQ(plan.output_lens[0], 1 + 3);
  h.Advance();  // one was
  const ExecutionPlan& next = h.Plan();
  EXPECT_EQ(next.context_lens[0], 8 + 3);
  EXPECT_EQ(next.output_lens[0], 2 + 3);
}

TEST(SchedulerPlans, APlanStaysReadableUntilThePlanAfterNext) {
  Harness h;
  h.Submit(1, Sequence(0, 5), 10);
  const ExecutionPlan& first = h.Step();
  const int64_t id = first.plan_id;
  h.Step();
  EXPECT_EQ(first.plan_id, id);
  EXPECT_EQ(first.query_lens[0], 5);
}

TEST(Overlap, ThoseThatShareEveryPageGiveWayTogether) {
  // Requests 3 and 4 come to share every page they have, resumed and without progress, just when the oldest needs one more. Neither gives a
  // page back by itself, and while both stay nobody can run.
  Harness h({.page = 3, .pages = 15, .seqs = 5, .budget = 64, .model_len = 200, .width = 3, .overlap = 1});
  const std::map<int64_t, int32_t> accepted{{100, 1}, {1, 3}, {2, 3}, {3, 2}, {4, 2}, {5, 1}};
  const auto advance = [&] {
    const ExecutionPlan& plan = *h.in_flight.front();
    h.in_flight.pop_front();
    const auto rows = static_cast<size_t>(plan.num_rows());
    std::vector<int32_t> counts(rows, 0);
    for (size_t i = 0; i < rows; ++i) {
      if ((plan.flags[i] & kSamples) == 0) continue;
      const bool extend = static_cast<int32_t>(i) < plan.num_extend_rows;
      counts[i] = extend ? 1 : std::min(plan.query_lens[i], accepted.at(plan.request_ids[i]));
    }
    h.Answer(plan.plan_id, counts, std::vector<int32_t>(3 * rows, 7), std::vector<int32_t>(rows, 0));
  };
  const auto step = [&] {
    const bool idle = h.Plan().num_rows() == 0;
    while (!h.in_flight.empty() && (idle || h.in_flight.size() > 1)) advance();
  };
  h.Submit(100, {1}, 1);  // outputs are expected to be short, so that more is admitted than fits
  h.Plan();
  advance();
  h.Submit(1, Sequence(500, 5), 46);
  step();
  h.Submit(2, Sequence(900, 5), 7);
  for (int64_t id = 3; id <= 5; ++id) h.Submit(id, Sequence(0, 11), 27);
  for (int steps = 0; h.scheduler.HasWork(); ++steps) {
    ASSERT_LT(steps, 500) << "nobody gives way";
    step();
  }
  for (int64_t id = 1; id <= 5; ++id) EXPECT_EQ(h.finished.at(id), FinishReason::kLength);
}

}  // namespace
}  // namespace tokenspeed

// Faults that were reported of other schedulers, by their ids; each is impossible here, and these tests say why.
#include <random>

#include "harness.h"

namespace tokenspeed {
namespace {

// A whole prompt in the cache left nothing to compute.
TEST(Cases, Kv01TheLastTokenIsAlwaysComputed) {
  for (const int32_t length : {3, 4, 5, 8, 9}) {
    for (const bool evicted_between : {false, true}) {
      Harness h({.pages = 8, .budget = 100});
      h.Submit(1, Sequence(0, length), 1);
      h.Drain();
      const int64_t cached_before = h.Stats().pages_cached[0];
      if (evicted_between) (void)h.scheduler.FlushCache();
      h.Submit(2, Sequence(0, length), 1);
      const ExecutionPlan& plan = h.Plan();
      ASSERT_EQ(plan.num_rows(), 1);
      EXPECT_GE(plan.query_lens[0], 1);
      EXPECT_EQ(plan.context_lens[0], evicted_between ? 0 : (length - 1) / 4 * 4);
      h.Advance();
      EXPECT_EQ(h.finished.at(2), FinishReason::kLength);
      EXPECT_EQ(h.Stats().pages_cached[0], cached_before);  // no twin of a shared page stays
      h.ExpectNothingHeld();
    }
  }
}

// The page that holds the last token of a full hit belongs to others; it must not be written.
TEST(Cases, Kv01NoSharedPageIsWritten) {
  Harness h({.budget = 100});
  h.Submit(1, Sequence(0, 8), 30);
  h.Step();
  h.Submit(2, Sequence(0, 8), 30);
  const ExecutionPlan& plan = h.Plan();
  // Request 2 computes tokens 4..7 into a page of its own, beside request 1 which still reads its page of them.
  const int32_t row = RowOf(plan, 2);
  EXPECT_EQ(plan.context_lens[static_cast<size_t>(row)], 4);
  int32_t shared = -1, own = -1;
  for (size_t i = 0; i < plan.delta_slot.size(); ++i) {
    if (plan.delta_slot[i] != plan.slots[static_cast<size_t>(row)]) continue;
    (plan.delta_index[i] == 0 ? shared : own) = plan.delta_page[i];
  }
  EXPECT_NE(shared, own);
  h.Advance();
  // From the next plan on both use one page, and the table says so.
  const ExecutionPlan& next = h.Plan();
  ASSERT_GE(next.delta_slot.size(), 1U);
  h.Advance();
  h.Drain();
}

// A request larger than the pool blocked the head of the queue for ever.
TEST(Cases, Kv03WhatNeverFitsIsRefusedAndOthersAreServed) {
  Harness h({.pages = 8, .model_len = 1'000});
  const SubmitResult result = h.Submit(1, Sequence(0, 40), 4);
  EXPECT_EQ(result.refusal, SubmitRefusal::kNeverFits);
  EXPECT_NE(result.reason.find("32"), std::string::npos);
  h.Submit(2, Sequence(0, 4), 4);
  h.Drain();
  EXPECT_EQ(h.finished.at(2), FinishReason::kLength);
}

TEST(Cases, Kv03PromptThatFitsWithOutputThatDoesNotEndsByLength) {
  Harness h({.pages = 8, .budget = 64, .model_len = 1'000});
  h.Submit(1, Sequence(0, 30), 100);
  h.Submit(2, Sequence(50, 4), 4);
  h.Drain();
  EXPECT_EQ(h.finished.at(1), FinishReason::kLength);
  EXPECT_EQ(h.finished.at(2), FinishReason::kLength);
  EXPECT_EQ(h.scheduler.InfoOf(1)->output_tokens, 3);  // 30 + 2 tokens with KV, and one sampled from the last
}

// Preempted, admitted again by the next chunk only, preempted again: no progress.
TEST(Cases, Kv04EveryRequestFinishesAndRetractionsAreBounded) {
  for (const int32_t overlap : {0, 1}) {
    for (const RetractionRule rule : {RetractionRule::kCheapestToRestore, RetractionRule::kYoungest}) {
      SchedulerConfig config = ConfigOf({.pages = 15, .seqs = 4, .budget = 4, .overlap = overlap});  // 1.5 requests of 40 tokens
      config.retraction = rule;
      Harness h(config);
      // Short outputs first, so that admission expects little and takes more than fits.
      h.Submit(100, {1}, 1);
      h.Drain();
      for (int64_t id = 0; id < 4; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 20), 20);
      const int before = h.steps;
      while (h.scheduler.HasWork() && h.steps < 10'000) {
        const bool idle = h.Plan().num_rows() == 0;
        while (!h.in_flight.empty() && (idle || static_cast<int32_t>(h.in_flight.size()) > overlap)) h.Advance();
      }
      while (!h.in_flight.empty()) h.Advance();
      EXPECT_EQ(h.finished.size(), 5U);
      // Ideal: 20 tokens in chunks of 4 and 20 decodes, one after the other.
      EXPECT_LT(h.steps - before, 10 * 4 * (5 + 20));
      for (int64_t id = 0; id < 4; ++id) EXPECT_LE(h.scheduler.InfoOf(id)->retractions, 10) << id;
      h.ExpectNothingHeld();
    }
  }
}

TEST(Cases, Kv04AResumedRequestComputesAPageBeforeItIsTakenFromAgain) {
  Harness h({.pages = 15, .seqs = 4, .budget = 8});
  h.Submit(100, {1}, 1);
  h.Drain();
  for (int64_t id = 0; id < 4; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 20), 20);
  std::map<int64_t, int32_t> computed_at_retraction;
  std::map<int64_t, int32_t> last;
  while (h.scheduler.HasWork()) {
    for (int64_t id = 0; id < 4; ++id) last[id] = h.scheduler.InfoOf(id)->computed_tokens;
    const ExecutionPlan& plan = h.Step();
    for (const int64_t id : plan.retracted_ids) {
      if (computed_at_retraction.contains(id)) {
        EXPECT_GE(last[id], computed_at_retraction[id] + 4) << id;
      }
      computed_at_retraction[id] = last[id];
    }
  }
  EXPECT_GT(h.Stats().retractions, 0);
}

// State was moved before it was known whether there was room for it.
TEST(Cases, Kv06ARetractionLosesNothingAndTheRequestCanFinish) {
  Harness h({.pages = 12, .seqs = 3, .budget = 32});
  h.Submit(100, {1}, 1);
  h.Drain();
  for (int64_t id = 0; id < 3; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 13), 20);
  bool retracted = false;
  while (h.scheduler.HasWork()) {
    const ExecutionPlan& plan = h.Step();
    retracted = retracted || !plan.retracted_ids.empty();
    const SchedulerStats stats = h.Stats();
    EXPECT_EQ(stats.pages_active[0] + stats.pages_cached[0] + stats.pages_free[0], 12);
  }
  EXPECT_TRUE(retracted);
  for (int64_t id = 0; id < 3; ++id) EXPECT_EQ(h.scheduler.InfoOf(id)->output_tokens, 20);
}

// A count of all retractions ever was waited on to become zero.
TEST(Cases, Kv07RetractedCountsThoseOfNowAndRetractionsThoseEver) {
  Harness h({.pages = 12, .seqs = 3, .budget = 32});
  h.Submit(100, {1}, 1);
  h.Drain();
  for (int64_t id = 0; id < 3; ++id) h.Submit(id, Sequence(static_cast<int32_t>(100 * id), 13), 20);
  int64_t most = 0;
  while (h.scheduler.HasWork()) {
    h.Step();
    most = std::max(most, h.Stats().retracted);
  }
  EXPECT_GT(most, 0);
  EXPECT_EQ(h.Stats().retracted, 0);
  EXPECT_GE(h.Stats().retractions, most);
}

// A retraction or an abort lost the partly used last page.
TEST(Cases, Kv09NothingLeaksWhateverTheLengthsAndTheOrder) {
  std::mt19937 random(9);
  for (int run = 0; run < 500; ++run) {
    const int32_t pages[] = {1, 2, 16};
    const int32_t page = pages[run % 3];
    Harness h({.page = page, .pages = 80 / page + 3, .seqs = 4, .budget = 16});
    h.Submit(100, {1}, 1);
    h.Step();
    for (int64_t id = 0; id < 5; ++id) {
      h.Submit(id, Sequence(static_cast<int32_t>(random() % 3), 1 + static_cast<int32_t>(random() % 40)), 1 + random() % 30);
    }
    while (h.scheduler.HasWork()) {
      h.Step();
      if (random() % 6 == 0) h.Abort(static_cast<int64_t>(random() % 5));
    }
    h.ExpectNothingHeld();
  }
}

// The only running request used up the pool, there was nobody to retract, and the scheduler died.
TEST(Cases, Kv10TheSoleRequestEndsByLengthWithItsTokens) {
  for (const int32_t overlap : {0, 1}) {
    Harness h({.pages = 4, .budget = 32, .overlap = overlap});
    h.Submit(1, Sequence(0, 8), 100);
    while (h.scheduler.HasWork() && h.steps < 200) {
      h.Plan();
      while (static_cast<int32_t>(h.in_flight.size()) > (h.scheduler.plans_in_flight() > overlap ? overlap : 0)) h.Advance();
    }
    EXPECT_EQ(h.finished.at(1), FinishReason::kLength);
    EXPECT_EQ(h.scheduler.InfoOf(1)->output_tokens, 9);  // 8 + 8 with KV, and one more sampled
    h.Submit(2, Sequence(50, 4), 2);
    while (h.scheduler.HasWork() && h.steps < 400) {
      h.Plan();
      while (!h.in_flight.empty()) h.Advance();
    }
    EXPECT_EQ(h.finished.at(2), FinishReason::kLength);
    h.ExpectNothingHeld();
  }
}

// A cached page found for one request was given to another before the first had pinned it.
TEST(Cases, Kv13AFoundPageIsNotGivenAwayInTheSamePass) {
  Harness h({.pages = 6, .seqs = 2, .budget = 64});
  h.Submit(1, Sequence(0, 13), 1);
  h.Drain();
  ASSERT_EQ(h.Stats().pages_cached[0], 3);
  h.Submit(2, Sequence(0, 13), 1);   // hits the only cached chain
  h.Submit(3, Sequence(500, 8), 1);  // needs two fresh pages: all that is free once 2 has its own
  const ExecutionPlan& plan = h.Plan();
  ASSERT_EQ(plan.num_rows(), 2);
  std::vector<int32_t> of_second, of_third;
  for (size_t i = 0; i < plan.delta_slot.size(); ++i) {
    (plan.delta_slot[i] == plan.slots[static_cast<size_t>(RowOf(plan, 2))] ? of_second : of_third).push_back(plan.delta_page[i]);
  }
  EXPECT_EQ(plan.context_lens[static_cast<size_t>(RowOf(plan, 2))], 12);
  for (const int32_t page : of_third) EXPECT_EQ(std::count(of_second.begin(), of_second.end(), page), 0);
  h.Advance();
  EXPECT_EQ(h.Stats().evicted_pages, 0);
  h.Drain();
}

// Aborting a request that owned nothing yet crashed the bookkeeping.
TEST(Cases, Kv15AnAbortIsSafeInEveryState) {
  Harness h;
  h.Submit(1, Sequence(0, 5), 5);
  EXPECT_EQ(h.scheduler.NumWaiting(), 1);
  EXPECT_TRUE(h.Abort(1));  // before any plan
  EXPECT_EQ(h.scheduler.NumWaiting(), 0);
  EXPECT_FALSE(h.Abort(1));   // twice
  EXPECT_FALSE(h.Abort(77));  // unknown
  h.Submit(2, Sequence(0, 5), 1);
  h.Step();
  EXPECT_EQ(h.finished.at(2), FinishReason::kLength);
  EXPECT_FALSE(h.Abort(2));  // in the tick of its end
  EXPECT_EQ(h.finished.at(1), FinishReason::kAborted);
  EXPECT_EQ(h.Stats().aborted, 1);
  h.ExpectNothingHeld();
}

// Longest prefix first never served a cold request while warm ones kept coming.
TEST(Cases, Kv22AColdRequestIsAdmittedUnderASteadyStreamOfHits) {
  Harness h({.pages = 64, .seqs = 1, .budget = 64});
  h.Submit(0, Sequence(0, 30), 1);
  h.Drain();
  for (int64_t id = 1; id <= 3; ++id) h.Submit(id, Sequence(0, 30), 1);
  h.Submit(999, Sequence(5'000, 30), 1);
  int64_t next = 10;
  for (int pass = 0; pass < 200 && !h.finished.contains(999); ++pass) {
    h.Submit(next, Sequence(0, 30), 1);
    h.Submit(next + 1, Sequence(0, 30), 1);
    next += 2;
    h.Step();
  }
  ASSERT_TRUE(h.finished.contains(999));
  EXPECT_LE(h.steps, 40);
}

TEST(Cases, Kv22ALongPromptIsServedAgainstAStreamOfShortOnes) {
  Harness h({.page = 16, .pages = 1'000, .seqs = 8, .budget = 64, .model_len = 10'000});
  h.Submit(999, Sequence(0, 5'000), 1);
  int64_t next = 0;
  for (int pass = 0; pass < 200 && !h.finished.contains(999); ++pass) {
    h.Submit(next++, Sequence(static_cast<int32_t>(10'000 + 20 * pass), 10), 4);
    h.Step();
  }
  EXPECT_TRUE(h.finished.contains(999));
  EXPECT_LE(h.steps, 5'000 / 56 + 20);
}

TEST(Cases, Kv22LowPriorityIsAgedIntoService) {
  SchedulerConfig config = ConfigOf({.pages = 64, .seqs = 1, .budget = 64});
  config.aging_us = 10;
  Harness h(config);
  auto low = h.Spec(999, Sequence(5'000, 9), 1);
  low.priority = 5;
  h.Submit(low);
  for (int64_t id = 0; id < 200 && !h.finished.contains(999); ++id) {
    h.Submit(2 * id, Sequence(static_cast<int32_t>(20 * id), 9), 1);
    h.Submit(2 * id + 1, Sequence(static_cast<int32_t>(20 * id + 10'000), 9), 1);
    h.Step();
  }
  ASSERT_TRUE(h.finished.contains(999));
  EXPECT_GE(h.steps, 20);   // priority counts
  EXPECT_LE(h.steps, 140);  // and so does waiting
}

}  // namespace
}  // namespace tokenspeed

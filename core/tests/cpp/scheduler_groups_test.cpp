// Several cache groups: full ones that share their pages, windows, and recurrent states.
#include "harness.h"

namespace tokenspeed {
namespace {

CacheGroupConfig Window(int32_t window, int32_t pages, int32_t page = 4) { return {page, pages, CacheGroupKind::kWindow, 0, window}; }
CacheGroupConfig Recurrent(int32_t interval, int32_t states) { return {interval, states, CacheGroupKind::kRecurrent}; }

SchedulerConfig With(std::vector<CacheGroupConfig> groups, Options options = {}) {
  SchedulerConfig config = ConfigOf(options);
  config.groups.insert(config.groups.end(), groups.begin(), groups.end());
  return config;
}

// The pages that a plan gives to table entries of a group, by index.
std::map<int32_t, int32_t> Deltas(const ExecutionPlan& plan, int32_t group) {
  std::map<int32_t, int32_t> pages;
  for (size_t i = 0; i < plan.delta_group.size(); ++i) {
    if (plan.delta_group[i] == group) pages[plan.delta_index[i]] = plan.delta_page[i];
  }
  return pages;
}

struct StateOp {
  StateKind kind;
  int32_t group, source, target;
  friend bool operator==(const StateOp&, const StateOp&) = default;
};
std::vector<StateOp> StateOps(const ExecutionPlan& plan) {
  std::vector<StateOp> ops;
  for (size_t i = 0; i < plan.state_kind.size(); ++i) {
    ops.push_back({static_cast<StateKind>(plan.state_kind[i]), plan.state_group[i], plan.state_source[i], plan.state_target[i]});
  }
  return ops;
}

// ---- configuration ----

TEST(Groups, AGroupThatCannotBeServedIsRefusedByName) {
  const auto refused = [](std::vector<CacheGroupConfig> groups, const char* field, Options options = {}) {
    try {
      With(std::move(groups), options).Validate();
      ADD_FAILURE() << field << " was taken";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(field), std::string::npos) << error.what();
    }
  };
  refused({{8, 64, CacheGroupKind::kFull}}, "groups[1].page_size is 8");
  refused({{4, 63, CacheGroupKind::kFull}}, "groups[1].num_pages is 63");
  refused({{4, 64, CacheGroupKind::kFull, 0, 16}}, "groups[1].window is 16");
  refused({Window(0, 8)}, "groups[1].window is 0");
  refused({Window(16, 4)}, "needs 5");
  refused({Window(17, 5)}, "needs 6", {.overlap = 1});  // the step in flight keeps its window
  refused({Window(16, 64, 8)}, "groups[1].page_size is 8");
  refused({Window(16, 8), Recurrent(6, 8)}, "groups[2].page_size is 6");
  refused({Recurrent(8, 1)}, "groups[1].num_pages is 1");
  refused({Recurrent(8, 4)}, "max_row_width is 2", {.width = 2});
  SchedulerConfig config = With({Recurrent(8, 4)});
  config.groups[0].host_pages = 16;
  EXPECT_NO_THROW(config.Validate());
  config.l3 = true;
  EXPECT_NO_THROW(config.Validate()) << "a store serves every group";
  config.l3 = false;
  config.groups[0].host_pages = 0;
  config.groups[1].host_pages = 8;
  EXPECT_NO_THROW(config.Validate()) << "each group may have host pages or none";
  config.enable_prefix_caching = false;
  EXPECT_THROW(config.Validate(), std::invalid_argument);
  config.groups = {Window(8, 16)};
  EXPECT_THROW(config.Validate(), std::invalid_argument);
  config.groups.clear();
  EXPECT_THROW(config.Validate(), std::invalid_argument);
  EXPECT_NO_THROW(With({{4, 64, CacheGroupKind::kFull}, Window(16, 5), Recurrent(8, 2)}).Validate());
}

// ---- full groups ----

TEST(Groups, FullGroupsShareTheirPageIdsAndDeltasNameTheFirst) {
  Harness harness(With({{4, 64, CacheGroupKind::kFull}}));
  harness.Submit(1, Sequence(0, 10));
  const ExecutionPlan& plan = harness.Step();
  EXPECT_EQ(Deltas(plan, 0).size(), 3u);
  EXPECT_TRUE(Deltas(plan, 1).empty());
  EXPECT_EQ(harness.Stats().pages_active, (std::vector<int64_t>{3, 3}));
  harness.Drain();
  EXPECT_EQ(harness.Stats().pages_cached[1], harness.Stats().pages_cached[0]);
}

// ---- windows ----

TEST(Groups, PagesBehindAWindowAreGivenBackWhileAPromptIsComputed) {
  Harness harness(With({Window(8, 8)}, {.budget = 8}));
  harness.Submit(1, Sequence(0, 80));
  for (int chunk = 1; chunk <= 10; ++chunk) {
    const ExecutionPlan& plan = harness.Step();
    EXPECT_EQ(plan.query_lens[0], 8);
    EXPECT_EQ(harness.Stats().pages_active[0], 2 * chunk);
    // Behind the next token stand 7 that it reads: two pages.
    EXPECT_EQ(harness.Stats().pages_active[1], 2);
  }
}

TEST(Groups, AWindowGroupHoldsAnOutputOfAnyLength) {
  Harness harness(With({Window(8, 3)}, {.pages = 200}));
  harness.Submit(1, Sequence(0, 3), 500);
  for (int step = 0; step < 490; ++step) {
    EXPECT_EQ(harness.Step().num_rows(), 1);
    EXPECT_LE(harness.Stats().pages_active[1], 3);
  }
  harness.Drain();
  EXPECT_EQ(harness.finished.at(1), FinishReason::kLength);
  EXPECT_EQ(harness.Stats().retractions, 0);
}

TEST(Groups, AChunkIsCutToThePagesOfTheWindowGroup) {
  Harness harness(With({Window(8, 5)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 50));
  EXPECT_EQ(harness.Step().query_lens[0], 20);  // all five pages
  EXPECT_EQ(harness.Step().query_lens[0], 12);  // two pages are behind it still
  harness.Drain();
}

TEST(Groups, APrefixIsResumedOnlyWhereItsWindowIsStillThere) {
  Harness harness(With({Window(8, 4)}, {.budget = 8}));
  harness.Submit(1, Sequence(0, 41), 1);
  harness.Drain();
  // Of the window group the last four pages are left: blocks 7 to 10 hold tokens 28 to 40 (the last one is not full and was not shared).
  harness.Submit(2, Sequence(0, 41), 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 40);
  harness.Advance();
  harness.Drain();
  std::vector<int32_t> fork = Sequence(0, 24);
  fork.push_back(500);
  harness.Submit(3, fork, 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 0) << "the window before token 24 is gone";
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.Stats().prefix_hit_tokens, 40);
}

TEST(Groups, AMatchFallsBackToTheLongestBoundaryThatHasItsWindow) {
  Harness harness(With({Window(5, 64)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 17), 1);
  harness.Drain();
  std::vector<int32_t> fork = Sequence(0, 13);
  fork.push_back(500);
  harness.Submit(2, fork, 1);
  const ExecutionPlan& plan = harness.Plan();
  EXPECT_EQ(plan.context_lens[0], 12);
  // Token 12 reads 8 to 12: block 2 is shared, block 3 is its own.
  const auto window = Deltas(plan, 1);
  ASSERT_EQ(window.size(), 2u);
  EXPECT_TRUE(window.contains(2) && window.contains(3));
  harness.Advance();
  harness.Drain();
}

TEST(Groups, PagesOfAWindowThatOthersUseStayUntilTheLastHasPassed) {
  Harness harness(With({Window(8, 16)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 17), 1);
  harness.Drain();
  harness.Submit(2, Sequence(0, 17), 40);
  harness.Submit(3, Sequence(0, 17), 2);
  const ExecutionPlan& plan = harness.Plan();
  ASSERT_EQ(plan.num_rows(), 2);
  EXPECT_EQ(plan.context_lens[0], 16);
  EXPECT_EQ(plan.context_lens[1], 16);
  harness.Advance();
  EXPECT_EQ(harness.Stats().pages_active[1], 4);  // two shared ones, and the tail of each
  harness.Drain();
  EXPECT_EQ(harness.Stats().pages_active[1], 0);
}

TEST(Groups, RejectedDraftsGiveTheirPagesBackInEveryGroup) {
  Harness harness(With({Window(8, 16)}, {.width = 4}));
  harness.Submit(1, Sequence(0, 3), 60);
  harness.Step();
  for (int step = 0; step < 20; ++step) {
    harness.Plan();
    harness.Advance();  // one of four
    EXPECT_LE(harness.Stats().pages_active[1], 3);
  }
  harness.Drain();
}

TEST(Groups, RequestsShareAWindowPoolThatHoldsNotAllOfThem) {
  Harness harness(With({Window(8, 8)}, {.seqs = 4}));
  for (int64_t id = 1; id <= 4; ++id) harness.Submit(id, Sequence(static_cast<int32_t>(1'000 * id), 12), 30);
  harness.Drain();
  EXPECT_EQ(harness.finished.size(), 4u);
  EXPECT_EQ(harness.Stats().retractions, 0) << "each was admitted with room for its window";
}

// ---- recurrent states ----

TEST(Groups, AFirstRowBeginsWithAZeroStateInTheTablesOnlyColumn) {
  Harness harness(With({Recurrent(8, 4)}));
  harness.Submit(1, Sequence(0, 5));
  const ExecutionPlan& plan = harness.Step();
  const auto state = Deltas(plan, 1);
  ASSERT_EQ(state.size(), 1u);
  EXPECT_EQ(StateOps(plan), (std::vector<StateOp>{{StateKind::kZero, 1, -1, state.at(0)}}));
  EXPECT_TRUE(StateOps(harness.Step()).empty());
}

TEST(Groups, ChunksEndAtMultiplesOfTheIntervalAndTheRowBehindGoesOnInACopy) {
  Harness harness(With({Recurrent(8, 8)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 20), 1);
  const ExecutionPlan& first = harness.Step();
  EXPECT_EQ(first.query_lens[0], 8);
  const int32_t begun = Deltas(first, 1).at(0);
  const ExecutionPlan& second = harness.Step();
  EXPECT_EQ(second.query_lens[0], 8);
  const int32_t continued = Deltas(second, 1).at(0);
  EXPECT_EQ(StateOps(second), (std::vector<StateOp>{{StateKind::kCopy, 1, begun, continued}}));
  EXPECT_EQ(harness.Step().query_lens[0], 4);
  EXPECT_EQ(harness.Stats().pages_cached[1], 2);
}

TEST(Groups, AKeptStateIsContinuedInACopyByEachOfTwo) {
  Harness harness(With({Recurrent(8, 8)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 17), 1);
  harness.Drain();
  for (int64_t id = 2; id <= 3; ++id) {
    std::vector<int32_t> tokens = Sequence(0, 18);
    tokens.push_back(static_cast<int32_t>(100 * id));
    harness.Submit(id, tokens, 3);
  }
  const ExecutionPlan& plan = harness.Plan();
  ASSERT_EQ(plan.num_rows(), 2);
  EXPECT_EQ(plan.context_lens[0], 16);
  EXPECT_EQ(plan.context_lens[1], 16);
  const auto ops = StateOps(plan);
  ASSERT_EQ(ops.size(), 2u);
  EXPECT_EQ(ops[0].kind, StateKind::kCopy);
  EXPECT_EQ(ops[0].source, ops[1].source);
  EXPECT_NE(ops[0].target, ops[1].target);
  EXPECT_NE(ops[0].target, ops[0].source);
  harness.Advance();
  harness.Drain();
}

TEST(Groups, APrefixBetweenTwoKeptStatesIsResumedAtTheEarlier) {
  Harness harness(With({Recurrent(8, 8)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 25), 1);
  harness.Drain();
  std::vector<int32_t> fork = Sequence(0, 14);
  fork.push_back(500);
  harness.Submit(2, fork, 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 8) << "the tree has twelve of its tokens";
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.Stats().prefix_hit_tokens, 8);
}

// No larger pool would have helped the one; it would have helped the other.
TEST(Groups, AStateThatWasNeverKeptIsToldFromOneThatWasEvicted) {
  Harness harness(With({Recurrent(8, 8)}, {.budget = 64}));
  const auto cut_of = [&](int64_t id, int32_t first, int32_t count) {
    harness.Submit(id, Sequence(first, count), 1);
    harness.Drain();
    return harness.scheduler.InfoOf(id)->hit_cut;
  };
  EXPECT_EQ(cut_of(1, 0, 25), HitCut::kNew);
  EXPECT_EQ(cut_of(2, 0, 25), HitCut::kNone);
  EXPECT_EQ(cut_of(3, 0, 22), HitCut::kBoundary) << "five blocks, and the state behind four";
  EXPECT_EQ(harness.scheduler.InfoOf(3)->cached_tokens, 16);
  EXPECT_EQ(harness.Stats().evicted_pages, 0);
  // Each twice: a state that nobody went on from would give way before that of the first.
  for (int32_t other = 0; other < 20; ++other) (void)cut_of(10 + other, 1'000 * (other / 2 + 1), 25);
  EXPECT_GT(harness.Stats().evicted_pages, 0);
  EXPECT_EQ(cut_of(4, 0, 25), HitCut::kEvicted);
}

TEST(Groups, AWindowThatWasEvictedCutsAHitAsEvicted) {
  Harness harness(With({Window(8, 8)}, {.budget = 64}));
  const auto cut_of = [&](int64_t id, int32_t first) {
    harness.Submit(id, Sequence(first, 25), 1);
    harness.Drain();
    return harness.scheduler.InfoOf(id)->hit_cut;
  };
  EXPECT_EQ(cut_of(1, 0), HitCut::kNew);
  for (int32_t other = 0; other < 3; ++other) (void)cut_of(10 + other, 1'000 * (other + 1));
  EXPECT_EQ(cut_of(2, 0), HitCut::kEvicted);
}

TEST(Groups, DecodesKeepTheirStateAtMultiplesOfTheInterval) {
  Harness harness(With({Recurrent(8, 8)}));
  harness.Submit(1, Sequence(0, 4), 15);
  harness.Drain();
  std::vector<int32_t> next = Sequence(0, 4);
  next.insert(next.end(), 15, 7);  // what the harness samples
  harness.Submit(2, next, 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 16);
  harness.Advance();
  harness.Drain();
}

TEST(Groups, WhereNoPageIsLeftAStateIsNotKeptAndTheRequestGoesOn) {
  Harness harness(With({Recurrent(4, 2)}, {.seqs = 2, .budget = 64}));
  harness.Submit(1, Sequence(0, 9), 20);
  harness.Submit(2, Sequence(100, 9), 20);
  harness.Drain();
  EXPECT_EQ(harness.finished.size(), 2u);
  EXPECT_EQ(harness.Stats().retractions, 0);
}

TEST(Groups, AStateThatAStepInFlightBringsAboutIsKeptWhenItHas) {
  Harness harness(With({Recurrent(8, 8)}, {.budget = 8, .overlap = 1}));
  harness.Submit(1, Sequence(0, 24), 1);
  harness.Plan();
  const ExecutionPlan& second = harness.Plan();  // before the first is advanced
  ASSERT_EQ(StateOps(second).size(), 1u);
  EXPECT_EQ(StateOps(second)[0].kind, StateKind::kCopy);
  EXPECT_EQ(harness.Stats().pages_cached[1], 0);
  harness.Advance();
  EXPECT_EQ(harness.Stats().pages_cached[1], 0) << "the second step copies it";
  harness.Advance();
  EXPECT_EQ(harness.Stats().pages_cached[1], 1);
  harness.Drain();
}

TEST(Groups, ARetractedRequestGoesOnFromItsLastKeptState) {
  // Two grow into a pool that holds one and a half of them.
  Harness harness(With({Recurrent(8, 8), Window(6, 32)}, {.pages = 12, .seqs = 2}));
  harness.Submit(9, Sequence(500, 3), 1);  // outputs are expected to be short
  harness.Drain();
  harness.Submit(1, Sequence(0, 10), 24);
  harness.Submit(2, Sequence(100, 10), 24);
  bool resumed = false;
  while (harness.scheduler.HasWork()) {
    const ExecutionPlan& plan = harness.Step();
    const int32_t row = RowOf(plan, 2);
    if (row >= 0 && (plan.flags[static_cast<size_t>(row)] & kNewInSlot) != 0 && harness.Stats().retractions > 0) {
      resumed = resumed || plan.context_lens[static_cast<size_t>(row)] % 8 == 0;
    }
    ASSERT_LT(harness.steps, 500);
  }
  EXPECT_GT(harness.Stats().retractions, 0);
  EXPECT_TRUE(resumed);
  EXPECT_EQ(harness.finished.size(), 3u);
}

TEST(Groups, ABlockTakesItsPagesOfAllGroupsWithIt) {
  Harness harness(With({Recurrent(8, 8), Window(64, 32)}, {.budget = 64}));
  harness.Submit(1, Sequence(0, 17), 1);
  harness.Drain();
  EXPECT_GT(harness.Stats().pages_cached[1] * harness.Stats().pages_cached[2], 0);
  harness.scheduler.FlushCache();
  harness.scheduler.CheckIntegrity();
  EXPECT_EQ(harness.Stats().pages_free, harness.Stats().pages_total);
}

TEST(Groups, WithoutPrefixCachingNothingIsKeptAndNoChunkIsCut) {
  SchedulerConfig config = With({Recurrent(8, 2), Window(8, 16)}, {.budget = 64});
  config.enable_prefix_caching = false;
  Harness harness(config);
  harness.Submit(1, Sequence(0, 30), 20);
  EXPECT_EQ(harness.Plan().query_lens[0], 30);
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.Stats().pages_free, harness.Stats().pages_total);
}

// ---- what is shared and what is kept ----

TEST(Groups, ARequestWaitsForAPrefixThatAnotherComputesBehindTheLastKeptState) {
  Harness harness(With({Recurrent(16, 8)}, {.budget = 12}));
  harness.Submit(1, Sequence(0, 60), 1);
  harness.Step();  // 12 tokens: no multiple of the interval yet
  std::vector<int32_t> fork = Sequence(0, 60);
  fork.push_back(500);
  harness.Submit(2, fork, 1);
  harness.Drain();
  EXPECT_EQ(harness.Stats().prefill_tokens, 60 + 61 - 48);
  EXPECT_GT(harness.Stats().inflight_waits, 0);
}

TEST(Groups, WhereNoBoundaryCanComeOfItARequestDoesNotWait) {
  Harness harness(With({Recurrent(64, 8)}, {.budget = 12}));
  harness.Submit(1, Sequence(0, 60), 1);
  harness.Step();
  harness.Submit(2, Sequence(0, 61), 1);
  harness.Step();
  EXPECT_EQ(harness.Stats().parked, 0);
  harness.Drain();
}

TEST(Groups, ALongPromptEvictsWhatItLeftBehindBeforeWhatOthersGoOnFrom) {
  Harness harness(With({Window(8, 16), Recurrent(8, 8)}, {.pages = 400, .seqs = 1, .budget = 8}));
  for (int64_t id = 1; id <= 3; ++id) {
    harness.Submit(id, Sequence(static_cast<int32_t>(10'000 * id), 17), 1);
    harness.Drain();
  }
  harness.Submit(9, Sequence(0, 600), 1);
  harness.Drain();
  for (int64_t id = 1; id <= 3; ++id) {
    harness.Submit(10 + id, Sequence(static_cast<int32_t>(10'000 * id), 18), 1);
    EXPECT_EQ(harness.Plan().context_lens[0], 16);
    harness.Advance();
    harness.Drain();
  }
  std::vector<int32_t> next = Sequence(0, 610);
  harness.Submit(20, next, 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 600) << "and its own last boundary is there";
  harness.Advance();
  harness.Drain();
}

TEST(Groups, WherePromptsPartAStateIsKeptEvenIfAnotherHasToGo) {
  Harness harness(With({Recurrent(8, 5)}, {.pages = 400, .seqs = 1, .budget = 64}));
  for (int64_t id = 1; id <= 6; ++id) {  // the pool is full of last boundaries
    harness.Submit(id, Sequence(static_cast<int32_t>(1'000 * id), 9), 1);
    harness.Drain();
  }
  for (int64_t id = 11; id <= 13; ++id) {
    std::vector<int32_t> prompt = Sequence(0, 36);
    const auto own = Sequence(static_cast<int32_t>(1'000 * id), 24);
    prompt.insert(prompt.end(), own.begin(), own.end());
    harness.Submit(id, prompt, 1);
    harness.Drain();
  }
  EXPECT_EQ(harness.scheduler.InfoOf(11)->cached_tokens, 0);
  EXPECT_EQ(harness.scheduler.InfoOf(12)->cached_tokens, 0) << "the first left nothing in the middle, for no page was to spare";
  EXPECT_EQ(harness.scheduler.InfoOf(13)->cached_tokens, 32) << "the second found that others part from it there";
}

TEST(Groups, AStopFromOutsideKeepsTheStateThatAnEndFromInsideKeeps) {
  Harness harness(With({Recurrent(8, 8)}, {.budget = 16}));
  harness.Submit(1, Sequence(0, 8), 20);
  harness.Step();
  EXPECT_EQ(harness.Stats().pages_cached[1], 0);
  EXPECT_TRUE(harness.Abort(1, FinishReason::kStop));
  EXPECT_EQ(harness.Stats().pages_cached[1], 1);
  harness.Submit(2, Sequence(0, 12), 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 8);
  harness.Advance();
  harness.Drain();
}

TEST(Groups, AFlushLeavesNoPageThatNothingUses) {
  Harness harness(With({Window(8, 32), Recurrent(8, 8)}, {.budget = 8}));
  harness.Submit(1, Sequence(0, 41), 1);
  for (int step = 0; step < 3; ++step) harness.Step();
  EXPECT_GT(harness.Stats().pages_cached[1] * harness.Stats().pages_cached[2], 0);
  harness.scheduler.FlushCache();
  harness.scheduler.CheckIntegrity();
  EXPECT_EQ(harness.Stats().pages_cached[1], 0);
  EXPECT_EQ(harness.Stats().pages_cached[2], 0);
  harness.Drain();
}

TEST(Groups, AHitCutForWantOfRoomIsToldFromOneThatNothingWasKeptFor) {
  Harness harness(With({Recurrent(8, 2)}, {.seqs = 1, .budget = 64}));
  harness.Submit(1, Sequence(0, 17), 1);
  harness.Drain();
  harness.Submit(2, Sequence(500, 17), 1);
  harness.Drain();
  harness.Submit(3, Sequence(0, 17), 1);
  harness.Drain();
  EXPECT_EQ(harness.scheduler.InfoOf(3)->hit_cut, HitCut::kEvicted);
  EXPECT_EQ(harness.scheduler.InfoOf(3)->hit_cut_group, 1);
}

}  // namespace
}  // namespace tokenspeed

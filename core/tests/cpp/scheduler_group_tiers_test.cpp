// The host tier and sessions with window and recurrent groups.
#include "tier_harness.h"

namespace tokenspeed {
namespace {

struct Setup {
  Options base{.page = 4, .pages = 12, .seqs = 4, .budget = 64};
  int32_t host_pages = 64;
  WritePolicy policy = WritePolicy::kThrough;
};
constexpr CacheGroupConfig kWindow{4, 12, CacheGroupKind::kWindow, 64, 8};     // tokens 8, so two blocks before a boundary
constexpr CacheGroupConfig kStates{8, 6, CacheGroupKind::kRecurrent, 64, 0};  // a state each 8 tokens

SchedulerConfig With(std::vector<CacheGroupConfig> groups, const Setup& setup = {}) {
  SchedulerConfig config = ConfigOf(setup.base);
  config.groups[0].host_pages = setup.host_pages;
  config.groups.insert(config.groups.end(), groups.begin(), groups.end());
  config.write_policy = setup.policy;
  return config;
}

// The pages of a kind of transfer in one group.
int64_t PagesIn(const TransferColumns& columns, int32_t group) { return std::count(columns.group.begin(), columns.group.end(), group); }

int32_t DeviceOf(const TransferColumns& columns, int32_t group) {
  const auto* found = std::find(columns.group.begin(), columns.group.end(), group);
  return found == columns.group.end() ? -1 : columns.device[static_cast<size_t>(found - columns.group.begin())];
}

// ---- to the host and back ----

TEST(GroupTiers, APrefixComesBackFromTheHostInAllGroups) {
  TierHarness harness(With({kWindow, kStates}));
  harness.Serve(1, 0, 33);
  harness.Serve(2, 1'000, 45);  // takes the whole device pool
  harness.Submit(3, Sequence(0, 33), 1);
  const ExecutionPlan& plan = harness.Plan();
  ASSERT_EQ(plan.num_rows(), 1);
  EXPECT_EQ(plan.context_lens[0], 32);
  EXPECT_EQ(PagesIn(plan.load_back, 0), 8);
  EXPECT_EQ(PagesIn(plan.load_back, 1), 2) << "the blocks of the window before token 32";
  EXPECT_EQ(PagesIn(plan.load_back, 2), 1) << "the state at 32";
  EXPECT_EQ(harness.load_backs.size(), 3u) << "an op has pages of one group";
  for (const int32_t row : plan.load_back.row) EXPECT_EQ(row, 0);
  ASSERT_EQ(plan.state_kind.size(), 1u);
  EXPECT_EQ(plan.state_source[0], DeviceOf(plan.load_back, 2)) << "the row goes on in a copy of what is loaded";
  harness.AnswerAll();
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.Stats().host_hit_tokens, 32);
  EXPECT_EQ(harness.scheduler.InfoOf(3)->host_tokens, 32);
  harness.ExpectNothingHeld();
}

TEST(GroupTiers, WhereTheBlocksAreStillThereTheOtherGroupsAloneComeBack) {
  CacheGroupConfig window = kWindow;
  window.num_pages = 4;
  TierHarness harness(With({window}, {.base = {.page = 4, .pages = 64, .seqs = 4, .budget = 16}}));
  harness.Serve(1, 0, 33);
  harness.Serve(2, 1'000, 33);  // takes the window's pages
  harness.Submit(3, Sequence(0, 33), 1);
  const ExecutionPlan& plan = harness.Plan();
  EXPECT_EQ(plan.context_lens[0], 32);
  EXPECT_EQ(PagesIn(plan.load_back, 0), 0);
  EXPECT_EQ(PagesIn(plan.load_back, 1), 2);
  harness.AnswerAll();
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.scheduler.InfoOf(3)->host_tokens, 32) << "without the host nothing of it could be used";
}

TEST(GroupTiers, AGroupWithoutHostPagesHasNoTierAndTheOthersHave) {
  CacheGroupConfig window = kWindow;
  window.host_pages = 0;
  TierHarness harness(With({window, kStates}));
  harness.Serve(1, 0, 33);
  harness.Serve(2, 1'000, 45);
  EXPECT_EQ(harness.Stats().host_pages_total, (std::vector<int64_t>{64, 0, 64}));
  EXPECT_EQ(harness.Stats().host_pages_cached[1], 0);
  EXPECT_GT(harness.Stats().host_pages_cached[2], 0);
  harness.Serve(3, 0, 33);
  EXPECT_EQ(harness.Stats().prefix_hit_tokens, 0) << "the window before it is gone";
}

TEST(GroupTiers, OfALongChunkTheWindowWhereItEndedIsCopied) {
  TierHarness harness(With({kWindow}, {.base = {.page = 4, .pages = 64, .seqs = 1, .budget = 40}}));
  harness.Submit(1, Sequence(0, 41), 1);
  harness.Step();
  const ExecutionPlan& plan = harness.Plan();
  EXPECT_EQ(PagesIn(plan.write_back, 0), 10);
  EXPECT_EQ(PagesIn(plan.write_back, 1), 2);
  harness.AnswerAll();
  harness.Advance();
  harness.Drain();
}

TEST(GroupTiers, APageWhoseCopyIsUnderWayIsNotUsedAgainAndIsWaitedForRatherThanTakenFromOthers) {
  CacheGroupConfig window = kWindow;
  window.num_pages = 6;  // what two requests need
  TierHarness harness(With({window}, {.base = {.page = 4, .pages = 64, .seqs = 2, .budget = 64}}));
  harness.Submit(1, Sequence(0, 7), 30);
  harness.Submit(2, Sequence(100, 7), 30);
  int idle = 0;
  for (int step = 0; step < 200 && harness.scheduler.HasWork(); ++step) {
    const ExecutionPlan& plan = harness.Plan();
    if (plan.num_rows() > 0) {
      harness.Advance();
    } else {
      ++idle;
      harness.AnswerAll();  // no copy ends before
    }
  }
  EXPECT_GT(idle, 0);
  EXPECT_EQ(harness.finished.size(), 2u);
  EXPECT_EQ(harness.Stats().retractions, 0);
  harness.Drain();
}

TEST(GroupTiers, OnEvictTheColdestOfEachGroupAreCopiedBeforeTheyGo) {
  CacheGroupConfig window = kWindow;
  window.num_pages = 7;
  TierHarness harness(With({window}, {.base = {.page = 4, .pages = 64, .seqs = 2, .budget = 8}, .policy = WritePolicy::kOnEvict}));
  harness.Serve(1, 0, 17);
  harness.Step();
  EXPECT_GT(harness.Stats().host_pages_cached[1], 0);
  EXPECT_EQ(harness.Stats().host_pages_cached[0], 0) << "the full pool is far from full";
  harness.Drain();
}

TEST(GroupTiers, SelectiveCopiesWhatASecondRequestGoesOnFrom) {
  TierHarness harness(With({kWindow, kStates}, {.policy = WritePolicy::kSelective}));
  harness.Serve(1, 0, 17);
  EXPECT_EQ(harness.Stats().pages_written_back, 0);
  harness.Submit(2, Sequence(0, 17), 1);
  const ExecutionPlan& plan = harness.Plan();
  EXPECT_EQ(PagesIn(plan.write_back, 1), 2);
  EXPECT_EQ(PagesIn(plan.write_back, 2), 1);
  harness.AnswerAll();
  harness.Advance();
  harness.Drain();
}

TEST(GroupTiers, ARetractedRequestLeavesItsStateOnTheHostAndGoesOnFromIt) {
  TierHarness harness(With({kStates}, {.base = {.page = 4, .pages = 12, .seqs = 2, .budget = 16}, .policy = WritePolicy::kSelective}));
  harness.Serve(9, 500, 3);
  harness.Submit(1, Sequence(0, 10), 24);
  harness.Submit(2, Sequence(100, 10), 24);
  bool written = false;
  while (harness.scheduler.HasWork()) {
    const ExecutionPlan& plan = harness.Plan();
    written = written || (harness.Stats().retractions > 0 && PagesIn(plan.write_back, 1) > 0);
    harness.AnswerAll();
    if (plan.num_rows() > 0) harness.Advance();
    ASSERT_LT(harness.steps, 500);
  }
  EXPECT_TRUE(written);
  EXPECT_GT(harness.Stats().pages_loaded_back, 0);
  EXPECT_EQ(harness.finished.size(), 3u);
}

// ---- loads that fail ----

class FailedGroupLoad : public ::testing::TestWithParam<int> {};

TEST_P(FailedGroupLoad, OfOneGroupSendsTheRequestBackToCompute) {
  TierHarness harness(With({kWindow, kStates}));
  harness.Serve(1, 0, 33);
  harness.Serve(2, 1'000, 45);
  harness.Submit(3, Sequence(0, 33), 1);
  harness.Plan();
  ASSERT_EQ(harness.load_backs.size(), 3u);
  const int bad = GetParam();
  std::vector<int64_t> ids;
  std::vector<int32_t> pages;
  for (const auto& [id, count] : harness.load_backs) {
    pages.push_back(static_cast<int>(ids.size()) == bad ? count - 1 : count);
    ids.push_back(id);
  }
  harness.load_backs.clear();
  harness.scheduler.CacheDone(ids, pages);
  harness.scheduler.CheckIntegrity();
  harness.Advance(7, {{3, Outcome::kReload}});
  EXPECT_EQ(harness.Stats().reloads, 1);
  harness.Drain();
  EXPECT_EQ(harness.finished.at(3), FinishReason::kLength);
  EXPECT_EQ(harness.scheduler.InfoOf(3)->hit_cut, HitCut::kLoadFailed);
  harness.ExpectNothingHeld();
}
INSTANTIATE_TEST_SUITE_P(EachGroup, FailedGroupLoad, ::testing::Values(0, 1, 2));

TEST(GroupTiers, AReloadToldBeforeTheAnswersForgetsWhatTheHostGaveInAllGroups) {
  TierHarness harness(With({kWindow, kStates}));
  harness.Serve(1, 0, 33);
  harness.Serve(2, 1'000, 45);
  harness.Submit(3, Sequence(0, 33), 1);
  harness.Plan();
  harness.Advance(7, {{3, Outcome::kReload}});
  EXPECT_EQ(harness.Stats().reloads, 1);
  EXPECT_EQ(harness.Plan().num_rows(), 0) << "its pages belong to the transfers until they are answered";
  harness.Answer(harness.load_backs, 0);
  const ExecutionPlan& plan = harness.Plan();
  EXPECT_EQ(plan.load_back.op.size(), 0u);
  EXPECT_EQ(plan.context_lens[0], 0);
  harness.AnswerAll();
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.finished.at(3), FinishReason::kLength);
}

TEST(GroupTiers, ARowThatWentOnBeforeItsLoadsWereAnsweredPublishesOnceAllHaveCome) {
  TierHarness harness(With({kWindow, kStates}));
  harness.Serve(1, 0, 33);
  harness.Serve(2, 1'000, 37);
  harness.Submit(3, Sequence(0, 33), 10);
  harness.Plan();
  const auto loads = std::exchange(harness.load_backs, {});
  harness.Advance();
  for (int step = 0; step < 9; ++step) {  // it passes the next multiple of the interval and the window of what is loaded
    harness.Plan();
    harness.Advance();
    harness.Answer(harness.write_backs);
  }
  for (const auto& [id, count] : loads) {
    harness.scheduler.CacheDone(std::vector<int64_t>{id}, std::vector<int32_t>{count});
    harness.scheduler.CheckIntegrity();
  }
  harness.Drain();
  EXPECT_EQ(harness.finished.at(3), FinishReason::kLength);
  harness.ExpectNothingHeld();
}

// ---- sessions ----

RequestSpec Turn(Harness& harness, int64_t id, int32_t count, int64_t session) {
  RequestSpec spec = harness.Spec(id, Sequence(0, count), 1);
  spec.session = session;
  spec.retain_us = 1'000'000;
  return spec;
}

TEST(GroupTiers, WhatASessionGoesOnFromStaysInAllGroupsWhileOthersCome) {
  CacheGroupConfig states = kStates, window = kWindow;
  states.num_pages = window.num_pages = 16;
  states.host_pages = window.host_pages = 0;
  TierHarness harness(With({window, states}, {.base = {.page = 4, .pages = 64, .seqs = 1, .budget = 64}, .host_pages = 0}));
  harness.Submit(Turn(harness, 1, 33, 5));
  harness.Drain();
  for (int64_t id = 2; id < 12; ++id) harness.Serve(id, static_cast<int32_t>(1'000 * id), 33);
  harness.Submit(20, Sequence(0, 40), 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 32);
  harness.Advance();
  harness.Drain();
  EXPECT_TRUE(harness.scheduler.ReleaseSession(5));
  for (int64_t id = 32; id < 42; ++id) harness.Serve(id, static_cast<int32_t>(1'000 * id), 33);
  harness.Submit(50, Sequence(0, 40), 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 0) << "a session that is released is as others are";
  harness.Advance();
  harness.Drain();
}

TEST(GroupTiers, SessionsKeepAtMostTheirShareOfEachGroup) {
  CacheGroupConfig states = kStates;
  states.num_pages = 8;  // half of them: four sessions
  states.host_pages = 0;
  TierHarness harness(With({states}, {.base = {.page = 4, .pages = 400, .seqs = 1, .budget = 64}, .host_pages = 0}));
  for (int64_t id = 1; id <= 9; ++id) {
    RequestSpec spec = Turn(harness, id, 33, id);
    spec.tokens = Sequence(static_cast<int32_t>(1'000 * id), 33);
    harness.Submit(spec);
    harness.Drain();
    EXPECT_LE(harness.Stats().sessions, 4);
  }
  EXPECT_EQ(harness.Stats().sessions, 4);
}

TEST(GroupTiers, ASessionIsCopiedToTheHostWhateverThePolicyAndBroughtUpInAllGroups) {
  SchedulerConfig config =
      With({kWindow, kStates}, {.base = {.page = 4, .pages = 24, .seqs = 4, .budget = 64}, .policy = WritePolicy::kSelective});
  config.retain_percent = 100;
  TierHarness harness(config);
  harness.Submit(Turn(harness, 1, 33, 5));
  harness.Drain();
  EXPECT_GE(harness.Stats().host_pages_cached[1], 2);
  EXPECT_GE(harness.Stats().host_pages_cached[2], 1);
  harness.Serve(2, 1'000, 93);  // takes the whole device pool
  EXPECT_EQ(harness.scheduler.PrefetchSession(5, harness.now), 8 + 2 + 1);
  int64_t windows = 0, states = 0;
  for (int plan = 0; plan < 4; ++plan) {
    const ExecutionPlan& made = harness.Plan();
    windows += PagesIn(made.load_back, 1);
    states += PagesIn(made.load_back, 2);
    harness.AnswerAll();
    if (made.num_rows() > 0) harness.Advance();
  }
  EXPECT_EQ(windows, 2);
  EXPECT_EQ(states, 1);
  harness.Submit(4, Sequence(0, 33), 1);
  const ExecutionPlan& plan = harness.Plan();
  EXPECT_EQ(plan.context_lens[0], 32) << "windows and state followed once the blocks were there";
  EXPECT_TRUE(plan.load_back.op.empty()) << "it is there already";
  harness.Advance();
  harness.Drain();
}

// The blocks of session 5's last turn are on the device, once another was served; of its window the host alone has the two pages.
SchedulerConfig WindowOnHost(int32_t window_pages) {
  CacheGroupConfig window = kWindow;
  window.num_pages = window_pages;
  return With({window}, {.base = {.page = 4, .pages = 64, .seqs = 4, .budget = 32}});
}

TEST(GroupTiers, TwoPrefetchesOfASessionAreOneLoadAndItsTurnWaitsForThat) {
  TierHarness harness(WindowOnHost(7));
  harness.Submit(Turn(harness, 1, 33, 5));
  harness.Drain();
  harness.Serve(2, 1'000, 33);  // takes the pages of the window
  EXPECT_EQ(harness.scheduler.PrefetchSession(5, harness.now), 2);
  EXPECT_EQ(harness.Plan().load_back.op.size(), 2u);
  EXPECT_EQ(harness.scheduler.PrefetchSession(5, harness.now), 2) << "the device lacks them until they are there";
  EXPECT_TRUE(harness.Plan().load_back.op.empty()) << "they are on their way";
  EXPECT_EQ(harness.scheduler.cache_ops_pending(), 0);
  harness.Submit(3, Sequence(0, 33), 1);
  const ExecutionPlan& waits = harness.Plan();
  EXPECT_EQ(waits.num_rows(), 0);
  EXPECT_TRUE(waits.load_back.op.empty()) << "nor does the turn bring them again";
  harness.scheduler.CheckIntegrity();
  harness.AnswerAll();
  const ExecutionPlan& turn = harness.Plan();
  ASSERT_EQ(turn.num_rows(), 1);
  EXPECT_EQ(turn.context_lens[0], 32);
  EXPECT_TRUE(turn.load_back.op.empty());
  harness.Advance();
  harness.Drain();
  harness.ExpectNothingHeld();
}

TEST(GroupTiers, ATurnThatWaitedForALoadThatFailedIsServed) {
  TierHarness harness(WindowOnHost(7));
  harness.Submit(Turn(harness, 1, 33, 5));
  harness.Drain();
  harness.Serve(2, 1'000, 33);
  EXPECT_EQ(harness.scheduler.PrefetchSession(5, harness.now), 2);
  harness.Plan();
  harness.Submit(3, Sequence(0, 33), 1);
  EXPECT_EQ(harness.Plan().num_rows(), 0);
  harness.Answer(harness.load_backs, 0);
  harness.Drain();
  EXPECT_EQ(harness.finished.at(3), FinishReason::kLength);
  harness.ExpectNothingHeld();
}

TEST(GroupTiers, ASessionsWindowTakesAtMostHalfOfTheRoom) {
  TierHarness harness(WindowOnHost(5));
  harness.Submit(Turn(harness, 1, 33, 5));
  harness.Drain();
  harness.Serve(2, 1'000, 33);
  harness.Submit(3, Sequence(2'000, 9), 8);  // has and is promised three pages of its window
  harness.Step();
  EXPECT_EQ(harness.scheduler.PrefetchSession(5, harness.now), 2);
  EXPECT_EQ(PagesIn(harness.Step().load_back, 1), 0) << "two pages are room, and the next plan is to find some";
  harness.Drain();
  EXPECT_EQ(harness.finished.at(3), FinishReason::kLength);
}

// ---- what is told ----

TEST(GroupTiers, AHitThatAGroupCutNamesIt) {
  TierHarness harness(With({kWindow, kStates}, {.base = {.page = 4, .pages = 64, .seqs = 1, .budget = 64}}));
  harness.Serve(1, 0, 30);
  harness.Submit(2, Sequence(0, 30), 1);
  EXPECT_EQ(harness.Plan().context_lens[0], 24) << "the states are kept at 8, 16 and 24; the blocks reach to 28";
  harness.Advance();
  harness.Drain();
  EXPECT_EQ(harness.scheduler.InfoOf(2)->hit_cut, HitCut::kBoundary) << "nothing was evicted: no state is kept at 28";
  EXPECT_EQ(harness.scheduler.InfoOf(2)->hit_cut_group, 2);
}

TEST(GroupTiers, EventsNameTheGroupAndTheBlock) {
  SchedulerConfig config = With({kStates});
  config.kv_events = true;
  TierHarness harness(config);
  harness.Serve(1, 0, 17);
  const KvEvents events = harness.scheduler.DrainKvEvents();
  int device = 0, host = 0;
  for (size_t i = 0; i < events.kind.size(); ++i) {
    if (events.group[i] != 1) continue;
    EXPECT_EQ(events.depth[i] % 2, 1) << "the last block before a multiple of 8 tokens";
    EXPECT_EQ(events.token_counts[i], 0);
    ++(events.medium[i] == static_cast<int32_t>(KvMedium::kDevice) ? device : host);
  }
  EXPECT_EQ(device, 2);
  EXPECT_EQ(host, 2);
}

}  // namespace
}  // namespace tokenspeed

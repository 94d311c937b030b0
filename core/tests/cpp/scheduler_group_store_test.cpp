// The store below the host with window and recurrent groups.
#include <set>
#include <utility>

#include "tier_harness.h"

namespace tokenspeed {
namespace {

constexpr CacheGroupConfig kWindow{4, 24, CacheGroupKind::kWindow, 64, 8};     // tokens 8, so two blocks before a boundary
constexpr CacheGroupConfig kStates{8, 12, CacheGroupKind::kRecurrent, 64, 0};  // a state each 8 tokens

SchedulerConfig With(std::vector<CacheGroupConfig> groups, int32_t threshold = 8) {
  SchedulerConfig config = ConfigOf(Options{.page = 4, .pages = 32, .seqs = 4, .budget = 64});
  config.groups[0].host_pages = 64;
  config.groups.insert(config.groups.end(), groups.begin(), groups.end());
  config.l3 = true;
  config.prefetch_threshold = threshold;
  return config;
}

using Entry = std::pair<int32_t, std::array<uint8_t, 16>>;  // group, hash

// A store that keeps what it is given and answers from that; it outlives the scheduler.
class StoreHarness : public TierHarness {
 public:
  explicit StoreHarness(const SchedulerConfig& config, std::set<Entry> has = {}) : TierHarness(config), stored(std::move(has)) {}

  std::set<Entry> stored;
  std::map<int64_t, std::vector<Entry>> asked, brought, kept;  // in flight
  std::vector<Entry> all_brought;
  int rounds = 0;  // plans with lookups

  const ExecutionPlan& Plan() {
    const ExecutionPlan& plan = TierHarness::Plan();
    Collect(plan.lookup, asked);
    Collect(plan.prefetch, brought);
    Collect(plan.store, kept);
    rounds += plan.lookup.op.empty() ? 0 : 1;
    return plan;
  }
  // What the store would say, to all that it is asked.
  void AnswerStore() {
    std::vector<int64_t> ids;
    std::vector<int32_t> pages;
    for (auto* kind : {&asked, &brought}) {
      for (const auto& [id, entries] : *kind) {
        const auto end = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) { return !stored.contains(entry); });
        ids.push_back(id);
        pages.push_back(static_cast<int32_t>(end - entries.begin()));
      }
    }
    for (const auto& [id, entries] : kept) {
      stored.insert(entries.begin(), entries.end());
      ids.push_back(id);
      pages.push_back(static_cast<int32_t>(entries.size()));
    }
    for (const auto& [id, entries] : brought) all_brought.insert(all_brought.end(), entries.begin(), entries.end());
    asked.clear();
    brought.clear();
    kept.clear();
    lookups.clear();
    prefetches.clear();
    stores.clear();
    scheduler.CacheDone(ids, pages);
    scheduler.CheckIntegrity();
  }
  void Drain() {
    for (int left = 1'000; scheduler.HasWork() || scheduler.cache_ops_pending() > 0; --left) {
      ASSERT_GT(left, 0) << "the scheduler does not come to an end";
      const ExecutionPlan& plan = Plan();
      AnswerStore();
      Answer(write_backs);
      Answer(load_backs);
      if (plan.num_rows() > 0) Advance();
    }
    AnswerStore();
  }
  void Serve(int64_t id, int32_t first, int32_t count) {
    ASSERT_TRUE(Submit(id, Sequence(first, count), 1).accepted());
    Drain();
  }
  int32_t Cached(int64_t id) const { return scheduler.InfoOf(id)->cached_tokens; }
  Entry At(int32_t group, int32_t block) { return {group, scheduler.CalcRollingHash(Sequence(0, 64), "", {}, 0)[static_cast<size_t>(block)].bytes}; }
  int64_t Brought(int32_t group) const {
    return std::count_if(all_brought.begin(), all_brought.end(), [&](const Entry& entry) { return entry.first == group; });
  }

 private:
  static void Collect(const TransferColumns& columns, std::map<int64_t, std::vector<Entry>>& kind) {
    for (size_t i = 0; i < columns.op.size(); ++i) kind[columns.op[i]].push_back({columns.group[i], columns.hash[i].bytes});
  }
};

// What an engine with these groups leaves in the store after a prompt of 41 tokens.
std::set<Entry> Left(const std::vector<CacheGroupConfig>& groups) {
  StoreHarness before(With(groups));
  before.Serve(1, 0, 41);
  return before.stored;
}

TEST(GroupStore, WindowsAndStatesAreStoredAsTheirHostPagesAre) {
  StoreHarness h(With({kWindow, kStates}));
  h.Serve(1, 0, 41);
  int64_t by_group[3] = {0, 0, 0};
  for (const Entry& entry : h.stored) ++by_group[entry.first];
  EXPECT_EQ(by_group[0], 10);
  EXPECT_EQ(by_group[2], 5) << "a state each 8 tokens";
  EXPECT_GE(by_group[1], 2) << "the window where its rows ended";
  EXPECT_TRUE(h.stored.contains(h.At(1, 9)) && h.stored.contains(h.At(1, 8)) && h.stored.contains(h.At(2, 9)));
  EXPECT_EQ(h.Stats().pages_stored, by_group[0] + by_group[1] + by_group[2]);
  h.Serve(2, 0, 41);
  EXPECT_EQ(h.Stats().pages_stored, by_group[0] + by_group[1] + by_group[2]) << "once";
}

TEST(GroupStore, ARestartGoesOnWhereEveryGroupCanAndBringsNoMore) {
  StoreHarness h(With({kWindow, kStates}), Left({kWindow, kStates}));
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 40);
  EXPECT_EQ(h.scheduler.InfoOf(3)->storage_tokens, 40);
  EXPECT_EQ(h.scheduler.InfoOf(3)->host_tokens, 40);
  EXPECT_EQ(h.Brought(0), 10);
  EXPECT_EQ(h.Brought(1), 2) << "the blocks of the window before token 40";
  EXPECT_EQ(h.Brought(2), 1) << "the state at 40";
  EXPECT_EQ(h.Stats().lookups, 1);
  EXPECT_EQ(h.Stats().lookup_hits, 1);
  h.ExpectNothingHeld();
}

TEST(GroupStore, TheFirstQuestionIsHowFarTheBlocksReach) {
  StoreHarness h(With({kWindow, kStates}), Left({kWindow, kStates}));
  h.Submit(3, Sequence(0, 43), 1);
  const ExecutionPlan& first = h.Plan();
  ASSERT_EQ(first.lookup.hash.size(), 10U);
  for (const int32_t group : first.lookup.group) EXPECT_EQ(group, 0);
  h.AnswerStore();
  const ExecutionPlan& second = h.Plan();
  ASSERT_EQ(h.asked.size(), 2U) << "an op has pages of one group";
  ASSERT_EQ(second.lookup.group.size(), 3U);
  EXPECT_EQ(second.lookup.group[0], 1);
  EXPECT_EQ((Entry{1, second.lookup.hash[0].bytes}), h.At(1, 9)) << "the last block of the window first";
  EXPECT_EQ((Entry{1, second.lookup.hash[1].bytes}), h.At(1, 8));
  EXPECT_EQ((Entry{2, second.lookup.hash[2].bytes}), h.At(2, 9));
  h.Drain();
  EXPECT_EQ(h.rounds, 2);
}

// The last token is computed again, so a prompt that ends with its block goes on a block earlier than it ended.
TEST(GroupStore, APromptOfWholeBlocksFindsTheWindowBeforeItsLastBlock) {
  std::set<Entry> left;
  {
    StoreHarness before(With({kWindow}));
    before.Serve(1, 0, 40);
    left = before.stored;
  }
  StoreHarness h(With({kWindow}), left);
  h.Serve(3, 0, 40);
  EXPECT_EQ(h.Cached(3), 36);
  EXPECT_EQ(h.scheduler.InfoOf(3)->storage_tokens, 36);
}

TEST(GroupStore, AStateThatIsMissingMovesTheBoundaryUp) {
  std::set<Entry> has = Left({kStates});
  StoreHarness names(With({kStates}));
  for (const int32_t block : {9, 7}) has.erase({1, names.At(1, block).second});
  StoreHarness h(With({kStates}), has);
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 24);
  EXPECT_EQ(h.scheduler.InfoOf(3)->storage_tokens, 24);
  EXPECT_EQ(h.Brought(0), 6) << "no block behind the boundary";
  EXPECT_EQ(h.Brought(1), 1);
  EXPECT_EQ(h.scheduler.InfoOf(3)->hit_cut, HitCut::kBoundary) << "the store had more blocks";
  EXPECT_EQ(h.scheduler.InfoOf(3)->hit_cut_group, 1);
}

TEST(GroupStore, ABlockThatAWindowLacksMovesTheBoundaryToItsBegin) {
  std::set<Entry> has;
  StoreHarness names(With({kWindow}));
  for (int32_t block = 0; block < 10; ++block) {
    has.insert(names.At(0, block));
    if (block != 8) has.insert(names.At(1, block));
  }
  StoreHarness h(With({kWindow}), has);
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 32);
  EXPECT_EQ(h.Brought(1), 2) << "blocks 6 and 7";
  EXPECT_EQ(h.Brought(0), 8);
}

TEST(GroupStore, WithoutAnyStateNothingIsBrought) {
  std::set<Entry> has = Left({kStates});
  std::erase_if(has, [](const Entry& entry) { return entry.first == 1; });
  StoreHarness h(With({kStates}), has);
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 0);
  EXPECT_EQ(h.all_brought.size(), 0U);
  EXPECT_EQ(h.Stats().lookup_hits, 0);
  EXPECT_EQ(h.Stats().storage_hit_tokens, 0);
  EXPECT_LE(h.rounds, 4) << "five states are asked for in rounds of 1, 2 and 4";
}

TEST(GroupStore, APromptThatCanReachNoFurtherBoundaryAsksNothing) {
  StoreHarness h(With({{32, 12, CacheGroupKind::kRecurrent, 64, 0}}));
  h.Submit(1, Sequence(0, 31), 1);
  EXPECT_EQ(h.StateOf(1), StateName::kSubmitted);
  h.Drain();
  EXPECT_EQ(h.Stats().lookups, 0);
}

TEST(GroupStore, WhatTheHostHasIsNotAskedForAndCountsAsTheHosts) {
  StoreHarness h(With({kWindow, kStates}), Left({kWindow, kStates}));
  h.Serve(1, 0, 25);  // 24 tokens of it are here now
  h.all_brought.clear();
  ASSERT_GT(h.scheduler.FlushCache(), 0);
  h.Serve(2, 0, 25);
  const int64_t blocks = h.Brought(0);
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 40);
  EXPECT_EQ(h.Brought(0), 10) << "each once";
  EXPECT_EQ(blocks, 6);
  EXPECT_EQ(h.scheduler.InfoOf(3)->storage_tokens, 16) << "what it could not have gone on from without the store";
}

class LostPart : public ::testing::TestWithParam<int32_t> {};

TEST_P(LostPart, OfOneGroupIsAMissAndNoWrongToken) {
  const int32_t bad = GetParam();
  StoreHarness h(With({kWindow, kStates}), Left({kWindow, kStates}));
  h.Submit(3, Sequence(0, 43), 1);
  while (h.brought.empty()) {
    h.Plan();
    if (h.brought.empty()) h.AnswerStore();
  }
  ASSERT_EQ(h.brought.size(), 3U);
  std::vector<int64_t> ids;
  std::vector<int32_t> pages;
  for (const auto& [id, entries] : h.brought) {
    ids.push_back(id);
    pages.push_back(static_cast<int32_t>(entries.size()) - (entries[0].first == bad ? 1 : 0));
  }
  h.brought.clear();
  h.scheduler.CacheDone(ids, pages);
  h.scheduler.CheckIntegrity();
  EXPECT_EQ(h.StateOf(3), StateName::kPrefetchDone);
  const ExecutionPlan& plan = h.Plan();
  EXPECT_EQ(plan.context_lens[0], 0) << "no other boundary has its window or state here";
  h.Advance();
  h.Drain();
  EXPECT_EQ(h.Stats().prefetches_failed, 1);
  EXPECT_EQ(h.Stats().storage_hit_tokens, 0);
  EXPECT_EQ(h.finished.at(3), FinishReason::kLength);
  h.ExpectNothingHeld();
}
INSTANTIATE_TEST_SUITE_P(EachGroup, LostPart, ::testing::Values(0, 1, 2));

TEST(GroupStore, ItGoesOnOnlyWhenEveryGroupsPartHasBeenAnswered) {
  StoreHarness h(With({kWindow, kStates}), Left({kWindow, kStates}));
  h.Submit(3, Sequence(0, 43), 1);
  while (h.brought.empty()) {
    h.Plan();
    if (h.brought.empty()) h.AnswerStore();
  }
  while (!h.brought.empty()) {
    EXPECT_EQ(h.StateOf(3), StateName::kPrefetching);
    const auto part = *h.brought.begin();
    h.brought.erase(part.first);
    h.scheduler.CacheDone(std::vector<int64_t>{part.first}, std::vector<int32_t>{static_cast<int32_t>(part.second.size())});
    h.scheduler.CheckIntegrity();
  }
  EXPECT_EQ(h.StateOf(3), StateName::kPrefetchDone);
  h.Drain();
  EXPECT_EQ(h.Cached(3), 40);
}

TEST(GroupStore, ASilentStoreCostsOneDeadlineHoweverManyQuestions) {
  SchedulerConfig config = With({kWindow, kStates});
  config.prefetch_timeout_us = 10;
  for (const int answered : {0, 1, 2}) {
    StoreHarness h(config, Left({kWindow, kStates}));
    h.Submit(3, Sequence(0, 43), 1);
    for (int plan = 0; h.StateOf(3) == StateName::kPrefetching; ++plan) {
      h.Plan();
      if (plan < answered) h.AnswerStore();
    }
    EXPECT_LE(h.now, 12);
    EXPECT_EQ(h.Stats().prefetch_timeouts, 1);
    EXPECT_EQ(h.scheduler.InfoOf(3)->hit_cut, HitCut::kStoreTimeout);
    h.Advance();
    h.Drain();
    EXPECT_EQ(h.Cached(3), 0);
    h.ExpectNothingHeld();
  }
}

TEST(GroupStore, TwoOfOnePrefixBringEachPartOnce) {
  StoreHarness h(With({kWindow, kStates}), Left({kWindow, kStates}));
  h.Submit(3, Sequence(0, 43), 1);
  h.Submit(4, Sequence(0, 43), 1);
  h.Drain();
  EXPECT_EQ(h.all_brought.size(), 13U);
  EXPECT_EQ(h.Cached(3), 40);
  EXPECT_EQ(h.Cached(4), 40);
}

TEST(GroupStore, WhereTheHostHasNoRoomForTheBlocksTheBoundaryIsLessDeep) {
  SchedulerConfig config = With({kStates});
  config.groups[0].host_pages = 5;
  StoreHarness h(config, Left({kStates}));
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 16) << "five pages hold the blocks up to the state at 16";
  EXPECT_EQ(h.Brought(0), 4);
  EXPECT_EQ(h.Brought(1), 1);
  EXPECT_GT(h.Stats().host_full, 0);
  EXPECT_EQ(h.Stats().lookup_hits, 1);
}

TEST(GroupStore, AGroupWithoutHostPagesCannotBeBrought) {
  CacheGroupConfig states = kStates;
  states.host_pages = 0;
  StoreHarness h(With({states}), Left({kStates}));
  h.Serve(3, 0, 43);
  EXPECT_EQ(h.Cached(3), 0);
  EXPECT_TRUE(h.all_brought.empty());
}

TEST(GroupStore, ASessionIsBroughtUpFromItInAllGroups) {
  SchedulerConfig config = With({kWindow, kStates});
  config.groups[0].host_pages = 12;
  config.groups[1].host_pages = 4;
  config.groups[2].host_pages = 3;
  config.retain_percent = 100;
  StoreHarness h(config);
  RequestSpec spec = h.Spec(1, Sequence(0, 41), 1);
  spec.session = 5;
  spec.retain_us = 1'000'000;
  h.Submit(spec);
  h.Drain();
  for (int32_t other = 1; other < 6; ++other) h.Serve(10 + other, 1'000 * other, 121);  // neither tier has room for anything else
  EXPECT_GT(h.scheduler.PrefetchSession(5, h.now), 0);
  while (h.scheduler.cache_ops_in_flight() + h.scheduler.cache_ops_pending() > 0) {
    h.Plan();
    h.AnswerStore();
    h.Answer(h.load_backs);
  }
  EXPECT_EQ(h.scheduler.PrefetchSession(5, h.now), 0) << "all of it is on the device";
  h.Submit(2, Sequence(0, 43), 1);
  EXPECT_EQ(h.Plan().context_lens[0], 40);
  h.Advance();
  h.Drain();
}

TEST(GroupStore, EventsOfTheStoreNameTheGroup) {
  SchedulerConfig config = With({kStates});
  config.kv_events = true;
  StoreHarness h(config);
  h.Serve(1, 0, 17);
  const KvEvents events = h.scheduler.DrainKvEvents();
  int64_t by_group[2] = {0, 0};
  for (size_t i = 0; i < events.kind.size(); ++i) {
    if (events.medium[i] == static_cast<int32_t>(KvMedium::kStorage)) ++by_group[events.group[i]];
  }
  EXPECT_EQ(by_group[0], 4);
  EXPECT_EQ(by_group[1], 2);
}

}  // namespace
}  // namespace tokenspeed

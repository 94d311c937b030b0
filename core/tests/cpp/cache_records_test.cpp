// What the cache remembers about pages: where they are, what left, and what happened to them.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>

#include "cache/evicted_pages.h"
#include "cache/kv_events.h"
#include "cache/page_map.h"

namespace tokenspeed {
namespace {

PageHash Named(uint64_t low, uint64_t high = 0) {
  PageHash hash;
  std::memcpy(hash.bytes.data(), &low, sizeof(low));
  std::memcpy(hash.bytes.data() + 8, &high, sizeof(high));
  return hash;
}

// ---- PageMap ----

TEST(PageMap, HoldsWhatAMapHoldsWhereverHashesMeet) {
  for (const uint64_t spread : {3, 40, 1'000'000}) {  // most hashes on few places; some; none
    PageMap<std::unique_ptr<int>> map(4);
    std::map<PageHash, int> expected;
    std::mt19937 random(1);
    for (int i = 0; i < 4'000; ++i) {
      const PageHash hash = Named(random() % spread, random() % 30);
      const auto found = map.find(hash);
      ASSERT_EQ(found != map.end(), expected.contains(hash));
      ASSERT_EQ(map.contains(hash), expected.contains(hash));
      if (!expected.contains(hash)) {
        map.emplace(hash, std::make_unique<int>(i));
        expected[hash] = i;
      } else {
        ASSERT_EQ(*found->second, expected.at(hash));
        if (random() % 3 > 0) {
          std::unique_ptr<int> taken = std::move(found->second);
          map.erase(found);
          expected.erase(hash);
        }
      }
      ASSERT_EQ(map.size(), expected.size());
    }
    std::map<PageHash, int> seen;
    for (const auto& [hash, value] : map) ASSERT_TRUE(seen.emplace(hash, *value).second);
    EXPECT_EQ(seen, expected);
  }
}

// ---- EvictedPages ----

TEST(EvictedPages, RemembersWhatWasAddedUntilItIsCleared) {
  EvictedPages pages(100);
  EXPECT_FALSE(pages.Contains(Named(1, 1)));
  pages.Add(Named(1, 1));
  pages.Add(Named(2, 2));
  EXPECT_TRUE(pages.Contains(Named(1, 1)));
  EXPECT_TRUE(pages.Contains(Named(2, 2)));
  EXPECT_FALSE(pages.Contains(Named(1, 2))) << "another page of the same place";
  pages.Clear();
  EXPECT_FALSE(pages.Contains(Named(1, 1)));
}

TEST(EvictedPages, ALaterPageOfTheSamePlaceIsRememberedInstead) {
  EvictedPages pages(100);
  pages.Add(Named(1, 10));
  pages.Add(Named(1, 20));
  EXPECT_FALSE(pages.Contains(Named(1, 10)));
  EXPECT_TRUE(pages.Contains(Named(1, 20)));
}

TEST(EvictedPages, APageOfZerosIsNotThereUnlessAdded) {
  EvictedPages pages(100);
  EXPECT_FALSE(pages.Contains(Named(0, 0)));
  pages.Add(Named(0, 0));
  EXPECT_TRUE(pages.Contains(Named(0, 0)));
}

TEST(EvictedPages, MostOfAsManyAsTheTiersHoldAreRemembered) {
  constexpr int kPages = 10'000;
  EvictedPages pages(kPages);
  std::mt19937_64 random(1);
  std::vector<PageHash> added;
  for (int i = 0; i < kPages; ++i) {
    added.push_back(Named(random(), random()));
    pages.Add(added.back());
  }
  int64_t remembered = 0, mistaken = 0;
  for (const PageHash& hash : added) {
    remembered += pages.Contains(hash) ? 1 : 0;
    mistaken += pages.Contains(Named(random(), random())) ? 1 : 0;
  }
  EXPECT_GT(remembered, kPages * 8 / 10);
  EXPECT_EQ(mistaken, 0);
}

// ---- KvEventLog ----

TEST(KvEventLog, TellsWhatHappenedInOrderAndOnce) {
  KvEventLog log(true);
  const std::vector<int32_t> tokens{7, 8};
  log.Stored(KvMedium::kDevice, Named(1), Named(9), 0, 5, tokens);
  log.Stored(KvMedium::kHost, Named(2), Named(1), 1);
  log.Removed(KvMedium::kDevice, Named(1), 0);
  log.Cleared();
  const KvEvents events = log.Drain();
  EXPECT_EQ(events.kind, (std::vector<int32_t>{0, 0, 1, 2}));
  EXPECT_EQ(events.medium, (std::vector<int32_t>{0, 1, 0, 0}));
  EXPECT_EQ(events.group, (std::vector<int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(events.depth, (std::vector<int32_t>{0, 1, 0, -1}));
  EXPECT_EQ(events.hash, (std::vector<PageHash>{Named(1), Named(2), Named(1), PageHash{}}));
  EXPECT_EQ(events.parent, (std::vector<PageHash>{PageHash{}, Named(1), PageHash{}, PageHash{}})) << "the first page has no parent";
  EXPECT_EQ(events.adapter, (std::vector<int64_t>{5, 0, 0, 0}));
  EXPECT_EQ(events.token_counts, (std::vector<int32_t>{2, 0, 0, 0}));
  EXPECT_EQ(events.tokens, tokens);
  EXPECT_TRUE(log.Drain().kind.empty());
  log.Cleared();
  EXPECT_EQ(log.Drain().kind, std::vector<int32_t>{2}) << "it goes on after a drain";
}

TEST(KvEventLog, RecordsNothingWhereItIsOff) {
  KvEventLog log(false);
  log.Stored(KvMedium::kDevice, Named(1), {}, 0);
  log.Removed(KvMedium::kDevice, Named(1), 0);
  log.Cleared();
  EXPECT_FALSE(log.on());
  EXPECT_TRUE(log.Drain().kind.empty());
}

}  // namespace
}  // namespace tokenspeed

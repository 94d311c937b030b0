#include "cache/host_cache.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace tokenspeed {
namespace {

std::vector<PageHash> Chain(const std::string& word) {
  std::vector<PageHash> hashes;
  PageHash previous = SeedHash(1, 0, "");
  for (const char letter : word) {
    const std::vector<int32_t> token{letter};
    previous = NextPageHash(previous, token, {}, 0);
    hashes.push_back(previous);
  }
  return hashes;
}

class HostCacheTest : public testing::Test {
 protected:
  // Brings what is missing of `word`; false where a page could not be had.
  bool Bring(const std::string& word, bool lands = true) {
    const auto hashes = Chain(word);
    for (size_t i = 0; i < hashes.size(); ++i) {
      if (cache.Find(hashes[i]) != nullptr) continue;
      const HostPin pin = cache.Arrive(hashes[i], i > 0 ? hashes[i - 1] : PageHash{}, static_cast<int32_t>(i), 1);
      if (!pin) return false;
      if (lands) cache.Land(pin);
    }
    Check();
    return true;
  }
  int32_t Depth(const std::string& word, int32_t known = 0) {
    const auto hashes = Chain(word);
    return cache.Match(hashes, 0, static_cast<int32_t>(hashes.size()), known);
  }
  HostPin Pin(const std::string& word) { return cache.Pin(Chain(word).back()); }
  void Check(const std::unordered_map<int32_t, int32_t>& pins = {}) const { cache.CheckIntegrity(pins); }

  KvEventLog events{true};
  HostCache cache{6, events};
};

TEST_F(HostCacheTest, FindsAPrefixAsFarAsEveryPageOfItIsThere) {
  Bring("abc");
  EXPECT_EQ(Depth("abcd"), 3);
  EXPECT_EQ(Depth("abx"), 2);
  EXPECT_EQ(Depth("xbc"), 0);
  EXPECT_EQ(Depth("abcd", 4), 3) << "an answer from before is verified";
  Bring("abcd");
  EXPECT_EQ(Depth("abcd", 3), 4) << "and extended";
}

TEST_F(HostCacheTest, APageMatchesOnlyOnceItHasLandedAndIsForgottenWhereItDoesNot) {
  const auto hashes = Chain("a");
  {
    const HostPin pin = cache.Arrive(hashes[0], {}, 0, 7);
    EXPECT_EQ(Depth("a"), 0);
    EXPECT_EQ(cache.Find(hashes[0])->arriving_by(), 7);
    Check({{pin.page(), 1}});
  }
  EXPECT_EQ(cache.Find(hashes[0]), nullptr);
  EXPECT_EQ(cache.available(), 6);
  Bring("a");
  EXPECT_EQ(Depth("a"), 1);
}

TEST_F(HostCacheTest, TheColdestPrefixGoesFirstAndFromItsEnd) {
  Bring("abc");
  Bring("xyz");
  cache.Touch(Chain("abc").back());
  Bring("p");
  EXPECT_EQ(Depth("xyz"), 2);
  EXPECT_EQ(Depth("abc"), 3);
  Bring("pqr");
  EXPECT_EQ(Depth("xyz"), 0) << "a parent is as cold as its child was";
  EXPECT_EQ(Depth("abc"), 3);
  EXPECT_EQ(Depth("pqr"), 3);
  EXPECT_EQ(cache.evicted(), 3);
}

TEST_F(HostCacheTest, WhatIsKeptGoesOnlyWhenNothingElseIsLeft) {
  const auto keep = [&](const std::string& word, bool kept) {
    for (const PageHash& hash : Chain(word)) {
      if (kept) cache.Keep(hash);
      else cache.Unkeep(hash);
    }
    Check();
  };
  keep("ab", true);
  Bring("abx");
  Bring("pqrs");
  EXPECT_EQ(Depth("abx"), 2) << "kept since before they came; what builds on them is not";
  Bring("uv");
  EXPECT_EQ(Depth("ab"), 2);
  EXPECT_EQ(Depth("pqrs"), 2);
  keep("ab", false);
  Bring("w");
  EXPECT_EQ(Depth("ab"), 1) << "as cold as if it had never been kept";
  keep("w", true);
  Bring("hijkl");
  EXPECT_EQ(Depth("w"), 1);
  Bring("hijklm");
  EXPECT_EQ(Depth("hijklm"), 6) << "a rank, not a lock";
}

TEST_F(HostCacheTest, APageInTransferIsNeverEvictedAndAFullHostRefuses) {
  Bring("abcdef");
  std::vector<HostPin> pins;
  std::unordered_map<int32_t, int32_t> counts;
  for (const char* word : {"a", "ab", "abc", "abcd", "abcde", "abcdef"}) {
    pins.push_back(Pin(word));
    ++counts[pins.back().page()];
  }
  EXPECT_FALSE(Bring("x"));
  EXPECT_EQ(Depth("abcdef"), 6);
  Check(counts);
  pins.clear();
  EXPECT_TRUE(Bring("x"));
  EXPECT_EQ(Depth("abcdef"), 5);
}

TEST_F(HostCacheTest, AnArrivalDoesNotPushItsOwnParentOut) {
  Bring("abcdef");
  Bring("abcdefg");  // the coldest leaf is its parent
  EXPECT_EQ(Depth("abcdef"), 6);
  EXPECT_EQ(cache.Find(Chain("abcdefg").back()), nullptr);
}

TEST_F(HostCacheTest, ADiscardedPageIsFoundByNobodyAndFreeOnceItsReadersHaveEnded) {
  Bring("abc");
  HostPin one = Pin("ab");
  HostPin two = Pin("ab");
  const int32_t page = one.page();
  cache.Discard(one);
  EXPECT_EQ(Depth("abc"), 1);
  one = {};
  Check({{page, 1}});
  EXPECT_EQ(cache.available(), 3);
  two = {};
  Check();
  EXPECT_EQ(cache.available(), 4);
  Bring("abc");
  EXPECT_EQ(Depth("abc"), 3) << "the orphan is found again once its parent is";
}

TEST_F(HostCacheTest, AFlushForgetsWhatIsOnItsWayToo) {
  Bring("ab");
  HostPin coming = cache.Arrive(Chain("abc").back(), Chain("ab").back(), 2, 1);
  cache.Flush(true);
  cache.Land(coming);
  EXPECT_EQ(Depth("abc"), 0);
  EXPECT_EQ(cache.ready(), 0);
  coming = {};
  Check();
  EXPECT_EQ(cache.available(), 6);
}

TEST_F(HostCacheTest, RecordsWhatCameAndWentInOrder) {
  Bring("ab");
  Bring("cdefg");
  const KvEvents record = events.Drain();
  ASSERT_EQ(record.kind, (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 1, 0}));
  EXPECT_EQ(record.hash[6], Chain("ab").back());
  EXPECT_EQ(record.parent[1], Chain("a").back());
  EXPECT_EQ(record.depth, (std::vector<int32_t>{0, 1, 0, 1, 2, 3, 1, 4}));
  EXPECT_TRUE(events.Drain().kind.empty());
}

TEST_F(HostCacheTest, RandomOperationsKeepTheInvariants) {
  std::mt19937 random(1);
  std::vector<HostPin> held;
  std::string kept;
  for (int i = 0; i < 3'000; ++i) {
    std::string word;
    for (unsigned n = 1 + random() % 4; n > 0; --n) word += static_cast<char>('a' + random() % 3);
    const auto hashes = Chain(word);
    const HostEntry* entry = cache.Find(hashes.back());
    switch (random() % 7) {
      case 0:
      case 1:
        if (entry == nullptr) {
          HostPin pin = cache.Arrive(hashes.back(), hashes.size() > 1 ? hashes[hashes.size() - 2] : PageHash{}, static_cast<int32_t>(hashes.size()) - 1, i);
          if (pin && random() % 4 != 0) cache.Land(pin);
          if (pin && random() % 2 == 0) held.push_back(std::move(pin));
        } else if (entry->ready()) {
          held.push_back(cache.Pin(hashes.back()));
        }
        break;
      case 2:
        if (!held.empty()) held.erase(held.begin() + static_cast<ptrdiff_t>(random() % held.size()));
        break;
      case 3: cache.Touch(hashes.back()); break;
      case 4:
        if (!held.empty() && random() % 4 == 0) cache.Discard(held[random() % held.size()]);
        break;
      case 5: {
        for (const PageHash& hash : Chain(kept)) cache.Unkeep(hash);
        kept = random() % 3 == 0 ? "" : word;
        for (const PageHash& hash : Chain(kept)) cache.Keep(hash);
        break;
      }
      default:
        if (random() % 50 == 0) cache.Flush(true);
    }
    std::unordered_map<int32_t, int32_t> pins;
    for (const HostPin& pin : held) ++pins[pin.page()];
    Check(pins);
  }
}

TEST(FlatHostCache, PagesBuildOnNoneOfTheirGroupAndTheColdestGoesFirst) {
  KvEventLog events{true};
  HostCache cache{2, events, 3, HostOrder::kFlat};
  const auto hashes = Chain("abc");
  for (int32_t i = 0; i < 2; ++i) {
    const HostPin pin = cache.Arrive(hashes[static_cast<size_t>(i)], i > 0 ? hashes[0] : PageHash{}, i, 1);
    cache.Land(pin);
  }
  cache.Touch(hashes[1]);
  { const HostPin pin = cache.Arrive(hashes[2], hashes[1], 2, 2); }
  EXPECT_FALSE(cache.Ready(hashes[0])) << "the page before goes first where it is colder";
  EXPECT_TRUE(cache.Ready(hashes[1]));
  cache.CheckIntegrity({});
  const KvEvents told = events.Drain();
  EXPECT_EQ(told.group, std::vector<int32_t>(3, 3));
  EXPECT_EQ(told.depth, (std::vector<int32_t>{0, 1, 0}));
}

}  // namespace
}  // namespace tokenspeed

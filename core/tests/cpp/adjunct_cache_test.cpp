#include "cache/adjunct_cache.h"

#include "harness.h"

namespace tokenspeed {
namespace {

PageHash Name(int number) {
  PageHash hash{};
  hash.bytes[0] = static_cast<uint8_t>(number);
  return hash;
}

void Check(const AdjunctCache& cache, const std::unordered_map<int32_t, int32_t>& pins = {}) {
  cache.CheckIntegrity(pins, [](int32_t, const PageHash&) {}, [](int32_t) {});
}

TEST(AdjunctCache, APublishedPageIsFoundUntilItsPlaceIsNeededAndTheColdestGoesFirst) {
  AdjunctCache cache(2);
  for (const int number : {1, 2}) {
    PageLease page = cache.Take();
    AdjunctPin pin = cache.Publish(Name(number), page);
    EXPECT_TRUE(pin && !page);
  }
  { const AdjunctPin again = cache.Pin(Name(1)); }  // now 2 is the coldest
  EXPECT_EQ(cache.available(), 2);
  const PageLease taken = cache.Take();
  EXPECT_TRUE(cache.Has(Name(1)));
  EXPECT_FALSE(cache.Has(Name(2)));
  EXPECT_EQ(cache.evicted(), 1);
  Check(cache);
}

TEST(AdjunctCache, APinnedPageIsNotAvailable) {
  AdjunctCache cache(1);
  PageLease page = cache.Take();
  AdjunctPin pin = cache.Publish(Name(1), page);
  AdjunctPin second = cache.Pin(Name(1));
  EXPECT_FALSE(pin.sole());
  second = {};
  EXPECT_TRUE(pin.sole());
  EXPECT_EQ(cache.available(), 0);
  EXPECT_FALSE(cache.Idle(Name(1)));
  Check(cache, {{pin.page(), 1}});
  pin = {};
  EXPECT_TRUE(cache.Idle(Name(1)));
  EXPECT_EQ(cache.available(), 1);
}

TEST(AdjunctCache, WhereABlockHasAPageItsTwinStaysWithItsOwner) {
  AdjunctCache cache(2);
  PageLease first = cache.Take();
  PageLease second = cache.Take();
  const AdjunctPin pin = cache.Publish(Name(1), first);
  EXPECT_FALSE(cache.Publish(Name(1), second));
  EXPECT_TRUE(second);
  EXPECT_NE(second.id(), pin.page());
}

TEST(AdjunctCache, APageLeavesWithItsBlock) {
  AdjunctCache cache(1);
  PageLease page = cache.Take();
  (void)cache.Publish(Name(1), page);
  cache.Drop(Name(2));  // never had one
  cache.Drop(Name(1));
  EXPECT_FALSE(cache.Has(Name(1)));
  EXPECT_EQ(cache.free(), 1);
  EXPECT_EQ(cache.evicted(), 0);
  Check(cache);
}

TEST(AdjunctCache, AMiscountedPinIsNoticed) {
  AdjunctCache cache(1);
  PageLease page = cache.Take();
  const AdjunctPin pin = cache.Publish(Name(1), page);
  EXPECT_THROW(Check(cache), std::logic_error);
  EXPECT_THROW(Check(cache, {{pin.page(), 2}}), std::logic_error);
}

// Publishes and lets go: nobody came back to it.
void Leave(AdjunctCache& cache, int number) {
  PageLease page = cache.Take();
  const AdjunctPin pin = cache.Publish(Name(number), page);
}

TEST(AdjunctCache, WhatWasLeftBehindGoesBeforeWhatMayBeGoneOnFromAndThatBeforeWhatASessionKeeps) {
  AdjunctCache cache(3);
  cache.Keep(Name(1));  // it is not there yet
  for (const int number : {1, 2, 3}) Leave(cache, number);
  cache.Warm(Name(2));
  EXPECT_TRUE(cache.disposable());
  Check(cache);
  const PageLease first = cache.Take();
  EXPECT_FALSE(cache.Has(Name(3)));
  EXPECT_FALSE(cache.disposable());
  EXPECT_TRUE(cache.Evicted(Name(3)));
  const PageLease second = cache.Take();
  EXPECT_FALSE(cache.Has(Name(2)));
  EXPECT_TRUE(cache.Has(Name(1)));
  EXPECT_EQ(cache.kept(), 1);
  cache.Unkeep(Name(1));
  EXPECT_EQ(cache.kept(), 0);
  Check(cache);
}

TEST(AdjunctCache, APageThatACopyReadsOutlivesItsBlockAndIsFoundByNobody) {
  AdjunctCache cache(2);
  Leave(cache, 1);
  AdjunctPin copy = cache.PinToCopy(Name(1));
  EXPECT_FALSE(cache.PinToCopy(Name(1))) << "it is on its way already";
  cache.Drop(Name(1));
  EXPECT_FALSE(cache.Has(Name(1)));
  EXPECT_TRUE(cache.Evicted(Name(1))) << "it was there, whether a copy reads it or not";
  EXPECT_EQ(cache.available(), 1);
  Check(cache, {{copy.page(), 1}});
  Leave(cache, 1);  // the same block again, in another page
  Check(cache, {{copy.page(), 1}});
  copy = {};
  EXPECT_EQ(cache.available(), 2);
  Check(cache);
}

TEST(AdjunctCache, ACopyOfTheColdestLeavesItTheColdestUnlessItWasUsed) {
  AdjunctCache cache(3);
  for (const int number : {1, 2, 3}) Leave(cache, number);
  std::vector<AdjunctPin> copies = cache.PinCold(2, [](const PageHash&) { return true; });
  ASSERT_EQ(copies.size(), 2u);
  { const AdjunctPin used = cache.Pin(Name(2)); }
  while (!copies.empty()) copies.pop_back();
  const PageLease first = cache.Take();
  EXPECT_FALSE(cache.Has(Name(1)));
  const PageLease second = cache.Take();
  EXPECT_FALSE(cache.Has(Name(3)));
  EXPECT_TRUE(cache.Has(Name(2)));
  Check(cache);
}

}  // namespace
}  // namespace tokenspeed

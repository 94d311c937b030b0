#include "scheduler/inflight_prefixes.h"

#include <gtest/gtest.h>

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

TEST(InflightPrefixes, WakesAWaiterWhenAllThatIsSharedIsPublished) {
  InflightPrefixes table;
  const auto owner = Chain("abcdef");
  const auto sharing_four = Chain("abcdzz");
  const auto unrelated = Chain("zbcdef");
  PrefixClaim claim = table.Claim(owner, 0, 6);
  PrefixWaiter waiter, stranger;
  EXPECT_TRUE(table.ParkIfComputing(waiter, sharing_four, 0, 6));
  EXPECT_FALSE(table.ParkIfComputing(stranger, unrelated, 0, 6));
  claim.Advance(3);
  EXPECT_TRUE(table.TakeWoken().empty());
  EXPECT_TRUE(waiter.parked());
  claim.Advance(4);
  EXPECT_EQ(table.TakeWoken(), std::vector<PrefixWaiter*>{&waiter});
  EXPECT_FALSE(waiter.parked());
}

TEST(InflightPrefixes, AWaiterThatCanUseLessWakesEarlier) {
  InflightPrefixes table;
  const auto owner = Chain("abcdef");
  PrefixClaim claim = table.Claim(owner, 0, 6);
  PrefixWaiter waiter;
  ASSERT_TRUE(table.ParkIfComputing(waiter, owner, 0, 2));
  claim.Advance(2);
  EXPECT_EQ(table.TakeWoken().size(), 1U);
}

TEST(InflightPrefixes, WakesEveryWaiterWhenTheClaimGoes) {
  InflightPrefixes table;
  const auto owner = Chain("abcdef");
  PrefixWaiter first, second;
  {
    PrefixClaim claim = table.Claim(owner, 1, 6);
    EXPECT_FALSE(table.ParkIfComputing(first, owner, 0, 6));  // page 0 is not being computed
    EXPECT_TRUE(table.ParkIfComputing(first, owner, 1, 6));
    EXPECT_TRUE(table.ParkIfComputing(second, owner, 1, 5));
  }
  EXPECT_EQ(table.TakeWoken().size(), 2U);
  EXPECT_FALSE(table.ParkIfComputing(first, owner, 1, 6));
}

TEST(InflightPrefixes, AWaiterMayLeave) {
  InflightPrefixes table;
  const auto owner = Chain("ab");
  PrefixWaiter waiter;
  {
    PrefixClaim claim = table.Claim(owner, 0, 2);
    ASSERT_TRUE(table.ParkIfComputing(waiter, owner, 0, 2));
    table.Unpark(waiter);
    table.Unpark(waiter);  // a second time: nothing
  }
  EXPECT_TRUE(table.TakeWoken().empty());
}

TEST(InflightPrefixes, TheFirstClaimOfAPageStands) {
  InflightPrefixes table;
  const auto chain = Chain("abc");
  PrefixClaim first = table.Claim(chain, 0, 3);
  PrefixWaiter waiter;
  {
    PrefixClaim second = table.Claim(chain, 0, 3);
    ASSERT_TRUE(table.ParkIfComputing(waiter, chain, 0, 3));
  }
  EXPECT_TRUE(waiter.parked());  // it waits for the first, which is still there
  first.Advance(3);
  EXPECT_EQ(table.TakeWoken().size(), 1U);
}

}  // namespace
}  // namespace tokenspeed

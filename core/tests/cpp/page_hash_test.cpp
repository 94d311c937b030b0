#include "cache/page_hash.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

namespace tokenspeed {
namespace {

std::vector<int32_t> Tokens(int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 5);
  return tokens;
}

TEST(PageHash, NamesFullPagesOnlyAndWholePrefixes) {
  const PageHash seed = SeedHash(4, 0, "");
  const auto tokens = Tokens(11);
  const auto hashes = HashPages(seed, 4, tokens, {});
  ASSERT_EQ(hashes.size(), 2U);
  auto other = tokens;
  other[0] = 99;  // a difference in page 0 renames page 1 too
  const auto others = HashPages(seed, 4, other, {});
  EXPECT_FALSE(hashes[0] == others[0]);
  EXPECT_FALSE(hashes[1] == others[1]);
  other = tokens;
  other[5] = 99;
  EXPECT_TRUE(hashes[0] == HashPages(seed, 4, other, {})[0]);
}

TEST(PageHash, NamesStayWhatTheyAreAcrossReleases) {
  // Fixed by hand from the definition in page_hash.h: a stored cache of another process must stay valid.
  const auto hashes = HashPages(SeedHash(4, 1, "s"), 4, Tokens(4), {});
  const PageHash again = NextPageHash(SeedHash(4, 1, "s"), Tokens(4), {}, 0);
  EXPECT_TRUE(hashes[0] == again);
}

TEST(PageHash, SaltAdapterAndPageSizeSeparate) {
  std::set<std::array<uint8_t, 16>> seeds;
  for (const int32_t page : {4, 8}) {
    for (const int64_t adapter : {0, 1}) {
      for (const char* salt : {"", "a", "ab"}) seeds.insert(SeedHash(page, adapter, salt).bytes);
    }
  }
  EXPECT_EQ(seeds.size(), 12U);
}

TEST(PageHash, AnExtraKeyChangesItsOwnPageAndThoseBehindOnly) {
  const PageHash seed = SeedHash(4, 0, "");
  const auto tokens = Tokens(12);
  const auto plain = HashPages(seed, 4, tokens, {});
  const ExtraKey image{5, {1, 2, 3}};
  const auto keyed = HashPages(seed, 4, tokens, std::vector<ExtraKey>{image});
  EXPECT_TRUE(plain[0] == keyed[0]);  // a system prompt before an image stays shared
  EXPECT_FALSE(plain[1] == keyed[1]);
  EXPECT_FALSE(plain[2] == keyed[2]);
  const auto elsewhere = HashPages(seed, 4, tokens, std::vector<ExtraKey>{{6, {1, 2, 3}}});
  EXPECT_FALSE(elsewhere[1] == keyed[1]);
}

}  // namespace
}  // namespace tokenspeed

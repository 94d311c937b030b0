#include "cache/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace tokenspeed {
namespace {

// A chain of page hashes for a word: one page a letter, named by the prefix that it ends.
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

class PrefixTreeTest : public testing::Test {
 protected:
  // Computes what is not cached of `word`, publishes it all at once, and returns the pin. The pages are noted in `page_of`.
  NodePin Use(const std::string& word) {
    const auto hashes = Chain(word);
    NodePin pin = tree.Pin(tree.Match(hashes, static_cast<int32_t>(hashes.size())));
    const int32_t depth = pin.depth();
    std::vector<PageLease> pages;
    for (size_t i = static_cast<size_t>(depth); i < hashes.size(); ++i) pages.push_back(pool.available() > 0 ? pool.Take() : tree.EvictOne().page);
    std::vector<PrefixTree::Replaced> replaced;
    tree.Publish(pin, std::span(hashes).subspan(static_cast<size_t>(depth)), pages, replaced);
    EXPECT_TRUE(replaced.empty());
    Check();
    return pin;
  }
  int32_t Depth(const std::string& word) {
    const auto hashes = Chain(word);
    return tree.Match(hashes, static_cast<int32_t>(hashes.size())).depth();
  }
  void Check() const {
    std::set<int32_t> seen(pool.free_ids().begin(), pool.free_ids().end());
    tree.CheckIntegrity([&](int32_t page) { EXPECT_TRUE(seen.insert(page).second); });
  }

  PagePool pool{64};
  PrefixTree tree;
};

TEST_F(PrefixTreeTest, MatchesTheLongestPrefixAndSplitsWherePathsPart) {
  NodePin a = Use("abcdef");
  EXPECT_EQ(tree.nodes(), 2);  // the root and one edge of six pages
  EXPECT_EQ(Depth("abcxyz"), 3);
  EXPECT_EQ(Depth("xyz"), 0);
  NodePin b = Use("abcxyz");
  EXPECT_EQ(tree.nodes(), 4);
  EXPECT_EQ(tree.pages(), 9);
  std::vector<int32_t> of_a(6), of_b(6);
  PrefixTree::CopyPages(a, of_a.data());
  PrefixTree::CopyPages(b, of_b.data());
  EXPECT_TRUE(std::equal(of_a.begin(), of_a.begin() + 3, of_b.begin()));
  EXPECT_NE(of_a[3], of_b[3]);
}

TEST_F(PrefixTreeTest, AppendsInPlaceForASoleUser) {
  NodePin pin = Use("abc");
  for (int i = 0; i < 5; ++i) {
    const auto hashes = Chain(std::string("abc") + std::string(static_cast<size_t>(i + 1), 'z'));
    std::vector<PageLease> pages;
    pages.push_back(pool.Take());
    std::vector<PrefixTree::Replaced> replaced;
    tree.Publish(pin, std::span(hashes).last(1), pages, replaced);
    Check();
  }
  EXPECT_EQ(tree.nodes(), 2);
  EXPECT_EQ(pin.depth(), 8);
}

TEST_F(PrefixTreeTest, OfTwoThatComputedTheSamePagesTheSecondUsesTheFirsts) {
  NodePin first = Use("abcdef");
  NodePin second = tree.PinRoot();
  const auto hashes = Chain("abcdzz");
  std::vector<PageLease> pages;
  for (int i = 0; i < 6; ++i) pages.push_back(pool.Take());
  const int32_t free_before = pool.available();
  std::vector<PrefixTree::Replaced> replaced;
  tree.Publish(second, hashes, pages, replaced);
  Check();
  ASSERT_EQ(replaced.size(), 4U);
  std::vector<int32_t> of_first(6);
  PrefixTree::CopyPages(first, of_first.data());
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(replaced[i].index, static_cast<int32_t>(i));
    EXPECT_EQ(replaced[i].page, of_first[i]);
  }
  replaced.clear();
  EXPECT_EQ(pool.available(), free_before + 4);
  EXPECT_EQ(second.depth(), 6);
}

TEST_F(PrefixTreeTest, EvictsColdLeavesFirstAndNeverWhatIsPinned) {
  NodePin kept = Use("abc");
  { NodePin cold = Use("abcxx"); }
  { NodePin warm = Use("yyy"); }
  EXPECT_EQ(tree.evictable(), 5);
  for (int i = 0; i < 2; ++i) (void)tree.EvictOne();
  Check();
  EXPECT_EQ(Depth("abcxx"), 3);
  EXPECT_EQ(Depth("yyy"), 3);
  for (int i = 0; i < 3; ++i) (void)tree.EvictOne();
  Check();
  EXPECT_EQ(tree.evictable(), 0);
  EXPECT_EQ(Depth("abc"), 3);
}

TEST_F(PrefixTreeTest, APinReleasedMergesWhatNeedNotBeSplit) {
  NodePin whole = Use("abcdef");
  {
    const auto hashes = Chain("abc");
    NodePin part = tree.Pin(tree.Match(hashes, 3));
    EXPECT_EQ(part.depth(), 3);
    EXPECT_EQ(tree.nodes(), 3);
    Check();
  }
  EXPECT_EQ(tree.nodes(), 2);
  EXPECT_EQ(whole.depth(), 6);
  Check();
}

TEST_F(PrefixTreeTest, ARememberedPositionIsVerified) {
  const auto hashes = Chain("abcdef");
  PrefixTree::Position hint;
  { NodePin pin = Use("abc"); hint = tree.Rematch(hint, hashes, 6); }
  EXPECT_EQ(hint.depth(), 3);
  { NodePin pin = Use("abcde"); }
  hint = tree.Rematch(hint, hashes, 6);
  EXPECT_EQ(hint.depth(), 5);
  (void)tree.EvictOne();
  hint = tree.Rematch(hint, hashes, 6);
  EXPECT_EQ(hint.depth(), 4);
  { NodePin other = Use("abcdz"); }  // the edge grew another tail at the same depth
  EXPECT_EQ(tree.Rematch(hint, hashes, 6).depth(), 4);
  while (tree.evictable() > 0) (void)tree.EvictOne();
  { NodePin other = Use("zzzzz"); }  // recycles the node
  EXPECT_EQ(tree.Rematch(hint, hashes, 6).depth(), 0);
}

TEST_F(PrefixTreeTest, CountsWhatAPinWouldTakeFromEviction) {
  NodePin pinned = Use("abc");
  { NodePin cold = Use("abcdef"); }
  const auto hashes = Chain("abcdez");
  const auto position = tree.Match(hashes, 6);
  EXPECT_EQ(position.depth(), 5);
  EXPECT_EQ(tree.EvictableOn(position), 2);
  const int32_t before = tree.evictable();
  NodePin pin = tree.Pin(position);
  EXPECT_EQ(before - tree.evictable(), 2);
  EXPECT_EQ(PrefixTree::ExclusivePages(pin), 2);
  EXPECT_EQ(PrefixTree::ExclusivePages(pinned), 0);
}

// The definition: a set of prefixes, each with a count of users; slow and plain.
TEST_F(PrefixTreeTest, AgreesWithAPlainSetOfPrefixesUnderRandomUse) {
  std::mt19937 random(3);
  std::vector<std::pair<std::string, NodePin>> users;
  for (int round = 0; round < 3'000; ++round) {
    if (users.size() < 6 && random() % 2 == 0) {
      std::string word;
      for (size_t n = 1 + random() % 9; n > 0; --n) word += static_cast<char>('a' + random() % 2);
      std::set<std::string> needed;
      users.emplace_back(word, Use(word));
    } else if (!users.empty()) {
      users.erase(users.begin() + static_cast<ptrdiff_t>(random() % users.size()));
    }
    if (random() % 8 == 0 && tree.evictable() > 0) (void)tree.EvictOne();
    Check();
    std::set<std::string> in_use;
    for (const auto& [word, pin] : users) {
      EXPECT_EQ(Depth(word), static_cast<int32_t>(word.size()));
      for (size_t n = 1; n <= word.size(); ++n) in_use.insert(word.substr(0, n));
    }
    EXPECT_EQ(tree.pages() - tree.evictable(), static_cast<int32_t>(in_use.size()));
    EXPECT_EQ(pool.available() + tree.pages(), pool.total());
  }
}

}  // namespace
}  // namespace tokenspeed

#include "scheduler/row_order.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

#include "cache/page_hash.h"

namespace tokenspeed {
namespace {

class RowOrderTest : public testing::Test {
 protected:
  NodePin Use(const std::string& word) {
    std::vector<PageHash> hashes;
    PageHash previous = SeedHash(1, 0, "");
    for (const char letter : word) {
      const std::vector<int32_t> token{letter};
      hashes.push_back(previous = NextPageHash(previous, token, {}, 0));
    }
    NodePin pin = tree.Pin(tree.Match(hashes, static_cast<int32_t>(hashes.size())));
    const auto depth = static_cast<size_t>(pin.depth());
    std::vector<PageLease> pages;
    for (size_t i = depth; i < hashes.size(); ++i) pages.push_back(pool.Take());
    std::vector<PrefixTree::Replaced> replaced;
    tree.Publish(pin, std::span(hashes).subspan(depth), pages, replaced);
    return pin;
  }
  void Arrange(const std::vector<std::string>& words) {
    pins.clear();
    for (const std::string& word : words) pins.push_back(Use(word));
    std::vector<const PrefixNode*> nodes;
    for (const NodePin& pin : pins) nodes.push_back(&pin.node());
    order.Arrange(nodes);
    rows.clear();
    for (const int32_t row : order.order()) rows.push_back(words[static_cast<size_t>(row)]);
  }

  PagePool pool{4'096};
  PrefixTree tree;
  std::vector<NodePin> pins;
  RowOrder order;
  std::vector<std::string> rows;
};

TEST_F(RowOrderTest, RowsThatShareStandTogetherAndIntervalsNest) {
  Arrange({"aaaaxx", "zz", "aaaayy", "aaqq", "aaaaxy"});
  EXPECT_EQ(rows, (std::vector<std::string>{"aaaaxx", "aaaaxy", "aaaayy", "aaqq", "zz"}));
  const std::vector<PrefixInterval> expected{{0, 4, 0, 2}, {0, 3, 2, 2}, {0, 2, 4, 1}};
  EXPECT_EQ(order.intervals(), expected);
}

TEST_F(RowOrderTest, OnePathIsOneInterval) {
  NodePin cut = Use("ab");  // a node in the middle of the shared path
  Arrange({"abcdef", "abcdef"});
  EXPECT_EQ(order.intervals(), (std::vector<PrefixInterval>{{0, 2, 0, 6}}));
}

TEST_F(RowOrderTest, NothingSharedKeepsTheOrderGiven) {
  Arrange({"c", "a", "b"});
  EXPECT_EQ(rows, (std::vector<std::string>{"c", "a", "b"}));
  EXPECT_TRUE(order.intervals().empty());
  Arrange({});
  EXPECT_TRUE(order.order().empty());
}

// The definition: two rows share as many pages as their words share letters.
TEST_F(RowOrderTest, IntervalsSayExactlyWhatRowsShare) {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::string> words(1 + random() % 10);
    for (std::string& word : words) {
      for (size_t n = 1 + random() % 8; n > 0; --n) word += static_cast<char>('a' + random() % 2);
    }
    Arrange(words);
    ASSERT_EQ(rows.size(), words.size());
    for (size_t r = 0; r + 1 < rows.size(); ++r) {
      size_t common = 0;
      while (common < std::min(rows[r].size(), rows[r + 1].size()) && rows[r][common] == rows[r + 1][common]) ++common;
      int32_t covered = 0;
      int32_t next_page = 0;
      for (const PrefixInterval& interval : order.intervals()) {
        if (interval.row_begin > static_cast<int32_t>(r) || interval.row_end < static_cast<int32_t>(r) + 2) continue;
        EXPECT_EQ(interval.first_page, next_page);  // outer before inner, without a gap
        next_page += interval.pages;
        covered += interval.pages;
      }
      EXPECT_EQ(covered, static_cast<int32_t>(common));
    }
  }
}

}  // namespace
}  // namespace tokenspeed

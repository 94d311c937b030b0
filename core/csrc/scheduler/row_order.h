// Tree order: rows that share a prefix stand together, and the shared stretches come out as nested intervals.
//
//     tree            A[0..8) -- B[8..12) -- r0, r2          rows       r0 r2 r1
//                            \-- r1                          intervals  (0,3, first 0, pages 8) (0,2, first 8, pages 4)
//
// The cost is O(rows + nodes on their paths), and it is paid when the set of rows or their sharing changes, not in every plan.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/prefix_tree.h"

namespace tokenspeed {

// Rows [row_begin, row_end) have the same pages at page indices [first_page, first_page + pages).
struct PrefixInterval {
  int32_t row_begin;
  int32_t row_end;
  int32_t first_page;
  int32_t pages;
  friend bool operator==(const PrefixInterval&, const PrefixInterval&) = default;
};

class RowOrder {
 public:
  // pins[i]: the node whose path row i uses. Afterwards order()[k] is the row that stands k-th. Rows keep their order as far as
  // sharing allows, so the result depends on the order given and on nothing else.
  void Arrange(std::span<const PrefixNode* const> pins);
  [[nodiscard]] const std::vector<int32_t>& order() const noexcept { return order_; }
  // Outer before inner; each with at least two rows and one page.
  [[nodiscard]] const std::vector<PrefixInterval>& intervals() const noexcept { return intervals_; }

 private:
  struct Met {
    const PrefixNode* node;
    int32_t first_child = -1, last_child = -1, next_sibling = -1;
    int32_t first_row = -1, last_row = -1;
  };
  int32_t Meet(const PrefixNode* node);
  void Walk();

  uint64_t mark_ = 0;
  std::vector<Met> met_;
  std::vector<int32_t> next_row_;
  std::vector<std::pair<int32_t, int32_t>> open_;  // (met index, its interval)
  std::vector<int32_t> order_;
  std::vector<PrefixInterval> intervals_;
};

}  // namespace tokenspeed

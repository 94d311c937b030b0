#include "scheduler/row_order.h"

#include <utility>

namespace tokenspeed {

// The index of `node` among those met in this arrangement; the path above it is met with it.
int32_t RowOrder::Meet(const PrefixNode* node) {
  int32_t result = -1;
  int32_t below = -1;
  for (; node != nullptr; node = node->parent_) {
    const bool known = node->mark_ == mark_;
    if (!known) {
      node->mark_ = mark_;
      node->mark_index_ = static_cast<int32_t>(met_.size());
      met_.push_back({.node = node});
    }
    const int32_t index = node->mark_index_;
    if (result < 0) result = index;
    if (below >= 0) {
      Met& parent = met_[static_cast<size_t>(index)];
      (parent.last_child < 0 ? parent.first_child : met_[static_cast<size_t>(parent.last_child)].next_sibling) = below;
      parent.last_child = below;
    }
    if (known) break;
    below = index;
  }
  return result;
}

void RowOrder::Arrange(std::span<const PrefixNode* const> pins) {
  ++mark_;
  met_.clear();
  order_.clear();
  intervals_.clear();
  next_row_.assign(pins.size(), -1);
  if (pins.empty()) return;
  for (size_t row = 0; row < pins.size(); ++row) {
    Met& at = met_[static_cast<size_t>(Meet(pins[row]))];
    const auto index = static_cast<int32_t>(row);
    (at.last_row < 0 ? at.first_row : next_row_[static_cast<size_t>(at.last_row)]) = index;
    at.last_row = index;
  }
  Walk();

  size_t kept = 0;
  for (const PrefixInterval& found : intervals_) {
    if (found.row_end - found.row_begin < 2 || found.pages == 0) continue;
    PrefixInterval* outer = kept > 0 ? &intervals_[kept - 1] : nullptr;
    const bool continues = outer != nullptr && outer->row_begin == found.row_begin && outer->row_end == found.row_end &&
                           outer->first_page + outer->pages == found.first_page;
    if (continues) outer->pages += found.pages;
    else intervals_[kept++] = found;
  }
  intervals_.resize(kept);
}

// Depth first: the rows of a node, then its children in the order in which they were met.
void RowOrder::Walk() {
  int32_t root = 0;
  while (met_[static_cast<size_t>(root)].node->parent_ != nullptr) root = met_[static_cast<size_t>(root)].node->parent_->mark_index_;
  open_.clear();
  int32_t at = root;
  while (true) {
    const Met& met = met_[static_cast<size_t>(at)];
    open_.emplace_back(at, static_cast<int32_t>(intervals_.size()));
    intervals_.push_back({static_cast<int32_t>(order_.size()), 0, met.node->begin(), met.node->end() - met.node->begin()});
    for (int32_t row = met.first_row; row >= 0; row = next_row_[static_cast<size_t>(row)]) order_.push_back(row);
    at = met.first_child;
    while (at < 0 && !open_.empty()) {
      const auto [closed, interval] = open_.back();
      open_.pop_back();
      intervals_[static_cast<size_t>(interval)].row_end = static_cast<int32_t>(order_.size());
      at = met_[static_cast<size_t>(closed)].next_sibling;
    }
    if (at < 0) return;
  }
}

}  // namespace tokenspeed

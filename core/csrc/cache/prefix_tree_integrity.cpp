#include <stdexcept>
#include <string>
#include <unordered_set>

#include "cache/prefix_tree.h"

namespace tokenspeed {
namespace {

void Require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("prefix tree: ") + what);
}

}  // namespace

void PrefixTree::Verify(std::vector<int32_t>& pages) const {
  std::unordered_set<const PrefixNode*> cold;
  for (const auto* list : {&lru_, &kept_}) {
    list->ForEach([&](const PrefixNode& node) { Require(cold.insert(&node).second, "a node stands twice in the LRU lists"); });
  }
  lru_.ForEach([&](const PrefixNode& node) { Require(node.keep_until_us_ <= now_us_, "a node that is kept stands among the others"); });

  int32_t evictable = 0;
  int32_t nodes = 0;
  int32_t edges = 0;
  size_t cold_seen = 0;
  std::vector<const PrefixNode*> open{root_};
  while (!open.empty()) {
    const PrefixNode& node = *open.back();
    open.pop_back();
    ++nodes;
    int32_t children = 0;
    int32_t active_children = 0;
    node.children_.ForEach([&](const PrefixNode& child) {
      ++children;
      active_children += child.users_ > 0 ? 1 : 0;
      Require(child.parent_ == &node, "a child does not name its parent");
      Require(child.begin_ == node.end(), "a child does not begin where its parent ends");
      open.push_back(&child);
    });
    Require(children == node.child_count_, "the number of children is wrong");
    if (&node == root_) {
      Require(node.edge_.empty(), "the root has pages");
      Require(node.users_ == node.pins_ + active_children + 1, "users of the root are wrong");
      continue;
    }
    ++edges;
    Require(!node.edge_.empty(), "an edge is empty");
    Require(node.users_ == node.pins_ + active_children, "users of a node are wrong");
    Require(node.pins_ > 0 || children != 1, "an unpinned node has one child only");
    const auto head = heads_.find(node.edge_.front().hash);
    Require(head != heads_.end() && head->second == &node, "an edge is not found by its first page");
    const bool is_cold = cold.contains(&node);
    Require(is_cold == (node.users_ == 0 && children == 0), "the LRU list is not exactly the unused leaves");
    cold_seen += is_cold ? 1 : 0;
    if (node.users_ == 0) evictable += static_cast<int32_t>(node.edge_.size());
    for (const CachedPage& cached : node.edge_) {
      Require(static_cast<bool>(cached.page), "a cached page has no lease");
      pages.push_back(cached.page.id());
    }
  }
  Require(cold_seen == cold.size(), "the LRU list holds a node that is not in the tree");
  Require(nodes == this->nodes(), "a node is neither in the tree nor recycled");
  Require(static_cast<size_t>(edges) == heads_.size(), "the map of first pages has strangers");
  Require(evictable == evictable_, "the count of evictable pages is wrong");
  Require(pages.size() == static_cast<size_t>(pages_), "the count of cached pages is wrong");
}

}  // namespace tokenspeed

#include "cache/prefix_tree.h"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace tokenspeed {

NodePin& NodePin::operator=(NodePin&& other) noexcept {
  if (this != &other) {
    Release();
    tree_ = std::exchange(other.tree_, nullptr);
    node_ = std::exchange(other.node_, nullptr);
  }
  return *this;
}

void NodePin::Release() noexcept {
  if (tree_ != nullptr) std::exchange(tree_, nullptr)->DropPin(*std::exchange(node_, nullptr));
}

PrefixTree::PrefixTree() : root_(&slab_.emplace_back()) {
  root_->users_ = 1;  // the root is always in use: it has no page, and never leaves
}

PrefixTree::~PrefixTree() { assert(root_->pins_ == 0 && "a pin outlived its tree"); }

// ---- finding ----

PrefixNode* PrefixTree::FindHead(const PageHash& hash) const noexcept {
  const auto found = heads_.find(hash);
  return found == heads_.end() ? nullptr : found->second;
}

PrefixTree::Position PrefixTree::MatchFrom(PrefixNode* node, int32_t depth, std::span<const PageHash> hashes, int32_t limit) noexcept {
  while (depth < limit) {
    if (depth == node->end()) {
      PrefixNode* child = FindHead(hashes[static_cast<size_t>(depth)]);
      if (child == nullptr) break;
      node = child;
      ++depth;
    } else {
      if (!(node->hash_at(depth) == hashes[static_cast<size_t>(depth)])) break;
      ++depth;
    }
  }
  return Position(node, depth);
}

PrefixTree::Position PrefixTree::Match(std::span<const PageHash> hashes, int32_t limit) noexcept {
  return MatchFrom(root_, 0, hashes, std::min(limit, static_cast<int32_t>(hashes.size())));
}

PrefixTree::Position PrefixTree::Rematch(const Position& hint, std::span<const PageHash> hashes, int32_t limit) noexcept {
  limit = std::min(limit, static_cast<int32_t>(hashes.size()));
  PrefixNode* node = hint.node_;
  if (node == nullptr || node->generation_ != hint.generation_) return MatchFrom(root_, 0, hashes, limit);
  int32_t depth = std::min({hint.depth_, node->end(), limit});
  while (node != root_ && depth <= node->begin()) node = node->parent_;
  // The edge may have lost its tail and grown another: the last page's hash vouches for the whole path.
  if (depth > 0 && !(node->hash_at(depth - 1) == hashes[static_cast<size_t>(depth - 1)])) return MatchFrom(root_, 0, hashes, limit);
  return MatchFrom(node, depth, hashes, limit);
}

int32_t PrefixTree::EvictableOn(const Position& position) const noexcept {
  if (position.node_ == nullptr) return 0;
  int32_t depth = position.depth_;
  int32_t pages = 0;
  for (const PrefixNode* node = position.node_; node->users_ == 0; node = node->parent_) {
    pages += depth - node->begin();
    depth = node->begin();
  }
  return pages;
}

int32_t PrefixTree::ExclusivePages(const NodePin& pin) noexcept {
  int32_t pages = 0;
  for (const PrefixNode* node = pin.node_; node->parent_ != nullptr && node->users_ == 1; node = node->parent_) {
    pages += static_cast<int32_t>(node->edge_.size());
  }
  return pages;
}

// ---- using ----

NodePin PrefixTree::PinRoot() noexcept {
  AddPin(*root_);
  return NodePin(this, root_);
}

NodePin PrefixTree::Pin(const Position& position) {
  PrefixNode* node = position.node_ == nullptr ? root_ : position.node_;
  if (position.depth_ < node->end()) node = Split(*node, position.depth_);
  AddPin(*node);
  return NodePin(this, node);
}

NodePin PrefixTree::PinAgain(const NodePin& pin) noexcept {
  AddPin(*pin.node_);
  return NodePin(this, pin.node_);
}

void PrefixTree::CopyPages(const NodePin& pin, int32_t* pages) noexcept {
  for (const PrefixNode* node = pin.node_; node != nullptr; node = node->parent_) {
    int32_t* out = pages + node->begin();
    for (const CachedPage& cached : node->edge_) *out++ = cached.page.id();
  }
}

void PrefixTree::AddUser(PrefixNode* node) noexcept {
  // Only a node that had no user changes what its parent sees, so this stops at the first path already in use.
  for (; node->users_++ == 0; node = node->parent_) {
    evictable_ -= static_cast<int32_t>(node->edge_.size());
    if (static_cast<ListLink<LruTag>*>(node)->linked()) lru_.Remove(*node);
  }
}

void PrefixTree::DropUser(PrefixNode* node) noexcept {
  for (; --node->users_ == 0; node = node->parent_) {
    evictable_ += static_cast<int32_t>(node->edge_.size());
    node->last_use_ = tick_;
    if (node->child_count_ == 0) ListOf(*node).PushBack(*node);
  }
}

void PrefixTree::AddPin(PrefixNode& node) noexcept {
  ++node.pins_;
  AddUser(&node);
}

void PrefixTree::DropPin(PrefixNode& node) noexcept {
  node.last_use_ = ++tick_;
  --node.pins_;
  DropUser(&node);
  if (node.pins_ == 0 && node.child_count_ == 1 && &node != root_) MergeIntoOnlyChild(node);
}

void PrefixTree::ReleaseCold(NodePin pin, uint64_t last_use) noexcept {
  PrefixNode& node = *pin.node_;
  const bool unused = node.last_use_ == last_use && node.users_ == 1 && node.pins_ == 1 && node.child_count_ == 0;
  if (!unused) return;
  pin.tree_ = nullptr;  // given back here: no tick, so that nothing on the path looks fresher than it was
  --node.pins_;
  for (PrefixNode* at = &node; --at->users_ == 0; at = at->parent_) {
    evictable_ += static_cast<int32_t>(at->edge_.size());
    if (at->child_count_ == 0) ListByLastUse(*at);
  }
}

void PrefixTree::ListByLastUse(PrefixNode& leaf) noexcept {
  PrefixNode* before = nullptr;
  IntrusiveList<PrefixNode, LruTag>& list = ListOf(leaf);
  list.VisitWhile([&](PrefixNode& other) {
    if (other.last_use_ > leaf.last_use_) before = &other;
    return before == nullptr;
  });
  if (before == nullptr) list.PushBack(leaf);
  else list.InsertBefore(leaf, *before);
}

// ---- keeping ----

void PrefixTree::Keep(const NodePin& pin, int64_t until_us) noexcept {
  for (PrefixNode* node = pin.node_; node->parent_ != nullptr; node = node->parent_) node->keep_until_us_ = std::max(node->keep_until_us_, until_us);
}

void PrefixTree::Unkeep(std::span<const PageHash> hashes, int32_t from) noexcept {
  for (PrefixNode* node = Match(hashes, static_cast<int32_t>(hashes.size())).node_; node->parent_ != nullptr; node = node->parent_) {
    if (node->begin() < from) return;
    node->keep_until_us_ = 0;
    if (!static_cast<ListLink<LruTag>*>(node)->linked()) continue;
    kept_.Remove(*node);
    ListByLastUse(*node);
  }
}

void PrefixTree::MovePin(NodePin& pin, PrefixNode& to) noexcept {
  if (pin.node_ == &to) return;
  PrefixNode* from = std::exchange(pin.node_, &to);
  AddPin(to);
  DropPin(*from);
}

// ---- growing ----

void PrefixTree::Publish(NodePin& pin, std::span<const PageHash> hashes, std::span<PageLease> pages, std::vector<Replaced>& replaced) {
  assert(hashes.size() == pages.size());
  size_t next = 0;
  while (next < hashes.size()) {
    PrefixNode* child = FindHead(hashes[next]);
    if (child == nullptr) break;
    // Somebody else published the same pages first: follow them as far as they agree.
    int32_t index = child->begin();
    for (; index < child->end() && next < hashes.size() && child->hash_at(index) == hashes[next]; ++index, ++next) {
      replaced.push_back({index, child->page_at(index), std::move(pages[next])});
    }
    MovePin(pin, index < child->end() ? *Split(*child, index) : *child);
  }
  if (next == hashes.size()) return;

  PrefixNode* node = pin.node_;
  const auto added = static_cast<int32_t>(hashes.size() - next);
  const bool sole_user = node != root_ && node->users_ == 1 && node->child_count_ == 0;
  if (!sole_user) {
    node = NewNode(node, node->end());
    heads_.emplace(hashes[next], node);
  }
  for (; next < hashes.size(); ++next) node->edge_.push_back({hashes[next], std::move(pages[next])});
  pages_ += added;
  if (!sole_user) {
    evictable_ += added;  // until the pin arrives, one line below
    lru_.PushBack(*node);
    MovePin(pin, *node);
  }
}

PrefixNode* PrefixTree::NewNode(PrefixNode* parent, int32_t begin) {
  PrefixNode* node;
  if (recycled_.empty()) {
    node = &slab_.emplace_back();
    recycled_.reserve(slab_.size());  // so that Recycle never allocates
  } else {
    node = recycled_.back();
    recycled_.pop_back();
  }
  node->parent_ = parent;
  node->begin_ = begin;
  ++parent->child_count_;
  parent->children_.PushBack(*node);
  return node;
}

PrefixNode* PrefixTree::Split(PrefixNode& node, int32_t depth) {
  assert(node.begin() < depth && depth < node.end());
  // parent -- [a b | c d] node   becomes   parent -- [a b] upper -- [c d] node
  PrefixNode* parent = node.parent_;
  PrefixNode* upper = NewNode(parent, node.begin_);
  parent->children_.Remove(node);
  --parent->child_count_;
  heads_[node.edge_.front().hash] = upper;

  const int32_t upper_pages = depth - node.begin_;
  const int32_t lower_pages = node.end() - depth;
  if (upper_pages <= lower_pages) {
    std::move(node.edge_.begin(), node.edge_.begin() + upper_pages, std::back_inserter(upper->edge_));
    node.edge_.erase(node.edge_.begin(), node.edge_.begin() + upper_pages);
  } else {
    std::deque<CachedPage> lower;
    std::move(node.edge_.begin() + upper_pages, node.edge_.end(), std::back_inserter(lower));
    node.edge_.erase(node.edge_.begin() + upper_pages, node.edge_.end());
    upper->edge_ = std::exchange(node.edge_, std::move(lower));
  }
  heads_.emplace(node.edge_.front().hash, &node);
  node.begin_ = depth;
  node.parent_ = upper;
  upper->children_.PushBack(node);
  upper->child_count_ = 1;
  upper->users_ = node.users_ > 0 ? 1 : 0;
  upper->last_use_ = node.last_use_;
  upper->keep_until_us_ = node.keep_until_us_;
  return upper;
}

// ---- shrinking ----

void PrefixTree::MergeIntoOnlyChild(PrefixNode& node) noexcept {
  // parent -- [a b] node -- [c d] child   becomes   parent -- [a b c d] child
  PrefixNode& child = node.children_.front();
  PrefixNode* parent = node.parent_;
  heads_.erase(child.edge_.front().hash);
  heads_[node.edge_.front().hash] = &child;
  if (node.edge_.size() >= child.edge_.size()) {
    std::move(child.edge_.begin(), child.edge_.end(), std::back_inserter(node.edge_));
    child.edge_ = std::move(node.edge_);
  } else {
    std::move(node.edge_.rbegin(), node.edge_.rend(), std::front_inserter(child.edge_));
  }
  child.begin_ = node.begin_;
  child.last_use_ = std::max(child.last_use_, node.last_use_);
  if (node.keep_until_us_ > child.keep_until_us_) {
    child.keep_until_us_ = node.keep_until_us_;
    if (static_cast<ListLink<LruTag>&>(child).linked()) {
      lru_.Remove(child);
      ListByLastUse(child);
    }
  }
  child.parent_ = parent;
  node.children_.Remove(child);
  node.child_count_ = 0;
  parent->children_.Remove(node);
  parent->children_.PushBack(child);
  Recycle(node);
}

void PrefixTree::Recycle(PrefixNode& node) noexcept {
  node.edge_.clear();
  node.parent_ = nullptr;
  node.users_ = node.pins_ = node.child_count_ = 0;
  node.keep_until_us_ = 0;
  ++node.generation_;
  recycled_.push_back(&node);
}

PrefixTree::Evicted PrefixTree::EvictOne() {
  assert(evictable_ > 0);
  PrefixNode& leaf = lru_.empty() ? kept_.front() : lru_.front();
  if (leaf.edge_.size() == 1) heads_.erase(leaf.edge_.front().hash);
  CachedPage& last = leaf.edge_.back();
  Evicted evicted{std::move(last.page), last.hash, leaf.end() - 1};
  leaf.edge_.pop_back();
  --evictable_;
  --pages_;
  if (leaf.edge_.empty()) Unlink(leaf);
  return evicted;
}

void PrefixTree::Unlink(PrefixNode& leaf) noexcept {
  PrefixNode* parent = leaf.parent_;
  const uint64_t last_use = leaf.last_use_;
  lru_.Remove(leaf);
  parent->children_.Remove(leaf);
  --parent->child_count_;
  Recycle(leaf);
  if (parent == root_) return;
  if (parent->child_count_ == 1 && parent->pins_ == 0) {
    MergeIntoOnlyChild(*parent);
  } else if (parent->child_count_ == 0 && parent->users_ == 0) {
    // Used together with the leaf just evicted: as cold as that was. Used later: behind the others.
    if (parent->last_use_ > last_use) ListOf(*parent).PushBack(*parent);
    else ListOf(*parent).PushFront(*parent);
  }
}

}  // namespace tokenspeed

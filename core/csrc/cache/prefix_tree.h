// The radix tree over full pages: which pages hold which prefix, who uses them, and which may be evicted.
//
//     root --[p0 p1 p2]-- A --[p3]-- B            an edge is a run of pages; the hash of a page names its whole prefix
//                          \--[p7 p8]-- C
//
// Kept at all times (CheckIntegrity):
//   * children of a node differ in the first page of their edge; a node that is neither pinned nor the root has 0 or >= 2 children
//     (a radix tree: the number of nodes on a path is the number of places where prefixes part, not the number of pages);
//   * a pin covers exactly the path of its node, so a node is split where a pin ends inside its edge;
//   * users(node) = pins on it + children with users > 0; a node without users has no user below it either;
//   * evictable() = pages on edges of nodes without users; all of them can be evicted, leaves first;
//   * the two LRU lists hold exactly the leaves without users, the coldest first: those that are kept for a while in one of their
//     own, from which nothing is taken before the other is empty.
//
// Who owns what: the tree owns its nodes and holds the lease of every cached page. A NodePin keeps one path from being evicted
// and gives it back in its destructor. Cost: Match is O(pages matched), Pin and Publish O(pages handed over + nodes passed),
// EvictOne O(1); a split or a merge moves the shorter part of one edge at most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/page_hash.h"
#include "cache/page_pool.h"
#include "support/intrusive_list.h"

namespace tokenspeed {

struct CachedPage {
  PageHash hash;
  PageLease page;
};

class PrefixNode;
struct LruTag;
struct SiblingTag;

class PrefixNode : public ListLink<LruTag>, public ListLink<SiblingTag> {
 public:
  [[nodiscard]] const PrefixNode* parent() const noexcept { return parent_; }
  // The pages of its edge stand at page indices [begin(), end()) of every request that uses the node.
  [[nodiscard]] int32_t begin() const noexcept { return begin_; }
  [[nodiscard]] int32_t end() const noexcept { return begin_ + static_cast<int32_t>(edge_.size()); }
  [[nodiscard]] int32_t page_at(int32_t index) const noexcept { return edge_[static_cast<size_t>(index - begin_)].page.id(); }
  [[nodiscard]] int32_t users() const noexcept { return users_; }
  [[nodiscard]] int32_t pins() const noexcept { return pins_; }

 private:
  friend class PrefixTree;
  [[nodiscard]] const PageHash& hash_at(int32_t index) const noexcept { return edge_[static_cast<size_t>(index - begin_)].hash; }

  std::deque<CachedPage> edge_;  // a deque: append, evict at the tail and split at the front never move the rest
  PrefixNode* parent_ = nullptr;
  IntrusiveList<PrefixNode, SiblingTag> children_;
  int32_t child_count_ = 0;
  int32_t begin_ = 0;
  int32_t pins_ = 0;
  int32_t users_ = 0;
  uint32_t generation_ = 0;  // raised when the node is recycled: a remembered position then no longer names it
  uint64_t last_use_ = 0;    // tick of the last release
  int64_t keep_until_us_ = 0;

  friend class RowOrder;  // marks the nodes that it has met
  mutable uint64_t mark_ = 0;
  mutable int32_t mark_index_ = 0;
};

class PrefixTree;

// Move-only; its destructor releases the path. REQUIRES: the tree outlives it.
class NodePin {
 public:
  NodePin() noexcept = default;
  NodePin(NodePin&& other) noexcept : tree_(std::exchange(other.tree_, nullptr)), node_(std::exchange(other.node_, nullptr)) {}
  NodePin& operator=(NodePin&& other) noexcept;
  NodePin(const NodePin&) = delete;
  NodePin& operator=(const NodePin&) = delete;
  ~NodePin() { Release(); }

  explicit operator bool() const noexcept { return tree_ != nullptr; }
  [[nodiscard]] const PrefixNode& node() const noexcept { return *node_; }
  // Pages of the pinned prefix.
  [[nodiscard]] int32_t depth() const noexcept { return node_ == nullptr ? 0 : node_->end(); }

 private:
  friend class PrefixTree;
  NodePin(PrefixTree* tree, PrefixNode* node) noexcept : tree_(tree), node_(node) {}
  void Release() noexcept;

  PrefixTree* tree_ = nullptr;
  PrefixNode* node_ = nullptr;
};

class PrefixTree {
 public:
  // A place in the tree, `depth` pages down. It pins nothing: remembered across calls it is a hint that Rematch verifies.
  class Position {
   public:
    Position() noexcept = default;
    [[nodiscard]] int32_t depth() const noexcept { return depth_; }

   private:
    friend class PrefixTree;
    Position(PrefixNode* node, int32_t depth) noexcept : node_(node), generation_(node->generation_), depth_(depth) {}
    PrefixNode* node_ = nullptr;
    uint32_t generation_ = 0;
    int32_t depth_ = 0;
  };

  // A page that was in the tree already when Publish brought its twin: page index, the page that stays, the one to be given back.
  struct Replaced {
    int32_t index;
    int32_t page;
    PageLease duplicate;
  };

  PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;
  ~PrefixTree();

  // The deepest cached prefix of `hashes`, at most `limit` pages.
  [[nodiscard]] Position Match(std::span<const PageHash> hashes, int32_t limit) noexcept;
  // The same answer, found from an earlier position of the same chain: O(what changed below it).
  [[nodiscard]] Position Rematch(const Position& hint, std::span<const PageHash> hashes, int32_t limit) noexcept;
  // Pages of the path that are evictable now and would not be once it is pinned. REQUIRES: nothing changed since the match.
  [[nodiscard]] int32_t EvictableOn(const Position& position) const noexcept;

  // REQUIRES: nothing changed since `position` was matched.
  [[nodiscard]] NodePin Pin(const Position& position);
  [[nodiscard]] NodePin PinRoot() noexcept;
  // The ids of the pages of the pinned path, in order, into `pages[0, pin.depth())`.
  static void CopyPages(const NodePin& pin, int32_t* pages) noexcept;

  // Hands the pages that follow the pinned prefix over to the tree and moves the pin behind them. Where the tree has the page
  // already, that one is used from now on and the caller's comes back in `replaced`.
  // REQUIRES: pages[i] holds the content that hashes[i] names; hashes continue the chain of the pinned path.
  void Publish(NodePin& pin, std::span<const PageHash> hashes, std::span<PageLease> pages, std::vector<Replaced>& replaced);

  // Takes the coldest unused page out. REQUIRES: evictable() > 0.
  struct Evicted {
    PageLease page;
    PageHash hash;
    int32_t depth;  // page index
  };
  [[nodiscard]] Evicted EvictOne();

  // One more pin on the same path.
  [[nodiscard]] NodePin PinAgain(const NodePin& pin) noexcept;
  // visit(index, hash, page) for the pages [begin, pin.depth()) of the pinned path, the last first.
  template <class Visit>
  static void VisitPages(const NodePin& pin, int32_t begin, Visit&& visit) {
    for (const PrefixNode* node = pin.node_; node != nullptr && node->end() > begin; node = node->parent_) {
      for (int32_t index = node->end() - 1; index >= std::max(begin, node->begin()); --index) {
        visit(index, node->hash_at(index), node->page_at(index));
      }
    }
  }
  // Keeps the pinned path above others until that time: it is evicted only when nothing else is left.
  void Keep(const NodePin& pin, int64_t until_us) noexcept;
  // Ends that for what is cached of `hashes` from page `from` on, as far as the edges let tell it apart from what stands before.
  void Unkeep(std::span<const PageHash> hashes, int32_t from) noexcept;
  void SetNow(int64_t now_us) noexcept { now_us_ = now_us; }

  // visit(hash) for up to `pages` of the pages that would be evicted next, in that order as far as it is known.
  template <class Visit>
  void VisitCold(int32_t pages, Visit&& visit) {
    const auto look = [&](PrefixNode& leaf) {
      for (int32_t index = leaf.end() - 1; index >= leaf.begin() && pages > 0; --index, --pages) visit(leaf.hash_at(index));
      return pages > 0;
    };
    if (pages > 0) lru_.VisitWhile(look);
    if (pages > 0) kept_.VisitWhile(look);
  }
  // Looks at up to `pages` of the pages that would be evicted next. A pin for each leaf on which `wanted(hash)` holds for one of
  // them, with the index of the first such page.
  struct ColdRun {
    NodePin pin;
    int32_t begin;
    uint64_t last_use;  // for ReleaseCold
  };
  template <class Wanted>
  [[nodiscard]] std::vector<ColdRun> PinCold(int32_t pages, Wanted&& wanted) {
    std::vector<std::pair<PrefixNode*, int32_t>> found;
    const auto look = [&](PrefixNode& leaf) {
      const int32_t stop = std::max(leaf.begin(), leaf.end() - pages);
      int32_t first = -1;
      for (int32_t index = stop; index < leaf.end() && first < 0; ++index) {
        if (wanted(leaf.hash_at(index))) first = index;
      }
      if (first >= 0) found.emplace_back(&leaf, first);
      pages -= leaf.end() - stop;
      return pages > 0;
    };
    lru_.VisitWhile(look);
    if (pages > 0) kept_.VisitWhile(look);
    std::vector<ColdRun> runs;
    for (const auto& [leaf, first] : found) {
      AddPin(*leaf);
      runs.push_back({NodePin(this, leaf), first, leaf->last_use_});
    }
    return runs;
  }
  // Releases what PinCold pinned: a leaf that nobody used since goes back to where it stood in the order of eviction.
  void ReleaseCold(NodePin pin, uint64_t last_use) noexcept;

  // visit(hash) for every cached page. O(pages): for checks.
  template <class Visit>
  void VisitHashes(Visit&& visit) const {
    std::vector<const PrefixNode*> open{root_};
    while (!open.empty()) {
      const PrefixNode& node = *open.back();
      open.pop_back();
      for (const CachedPage& cached : node.edge_) visit(cached.hash);
      node.children_.ForEach([&](const PrefixNode& child) { open.push_back(&child); });
    }
  }

  [[nodiscard]] int32_t evictable() const noexcept { return evictable_; }
  [[nodiscard]] int32_t pages() const noexcept { return pages_; }
  [[nodiscard]] int32_t nodes() const noexcept { return static_cast<int32_t>(slab_.size() - recycled_.size()); }

  // Pages at the end of the pinned path that nobody else uses: what releasing the pin would make evictable.
  [[nodiscard]] static int32_t ExclusivePages(const NodePin& pin) noexcept;

  // Throws std::logic_error naming what is wrong. `visit` receives the id of every cached page.
  template <class Visit>
  void CheckIntegrity(Visit&& visit) const {
    std::vector<int32_t> pages;
    Verify(pages);
    for (const int32_t page : pages) visit(page);
  }

 private:
  friend class NodePin;
  PrefixNode* NewNode(PrefixNode* parent, int32_t begin);
  void Recycle(PrefixNode& node) noexcept;
  // REQUIRES: a leaf without users whose edge is empty.
  void Unlink(PrefixNode& leaf) noexcept;
  PrefixNode* FindHead(const PageHash& hash) const noexcept;
  Position MatchFrom(PrefixNode* node, int32_t depth, std::span<const PageHash> hashes, int32_t limit) noexcept;
  // Cuts the edge of `node` so that a new parent of it ends at `depth`; returns that parent. `node` keeps its identity.
  PrefixNode* Split(PrefixNode& node, int32_t depth);
  void MergeIntoOnlyChild(PrefixNode& node) noexcept;
  void AddUser(PrefixNode* node) noexcept;
  void DropUser(PrefixNode* node) noexcept;
  void AddPin(PrefixNode& node) noexcept;
  void DropPin(PrefixNode& node) noexcept;
  [[nodiscard]] IntrusiveList<PrefixNode, LruTag>& ListOf(const PrefixNode& leaf) noexcept { return leaf.keep_until_us_ > now_us_ ? kept_ : lru_; }
  void ListByLastUse(PrefixNode& leaf) noexcept;
  void MovePin(NodePin& pin, PrefixNode& to) noexcept;
  void Verify(std::vector<int32_t>& pages) const;

  std::deque<PrefixNode> slab_;
  std::vector<PrefixNode*> recycled_;
  PrefixNode* root_;
  // The first page of every edge. A hash names a whole prefix, so one map serves all nodes.
  std::unordered_map<PageHash, PrefixNode*, PageHashHasher> heads_;
  IntrusiveList<PrefixNode, LruTag> lru_;
  IntrusiveList<PrefixNode, LruTag> kept_;
  int64_t now_us_ = 0;
  int32_t evictable_ = 0;
  int32_t pages_ = 0;
  uint64_t tick_ = 0;
};

}  // namespace tokenspeed

#include "cache/adjunct_cache.h"

#include <cassert>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace tokenspeed {

void AdjunctPin::Release() noexcept {
  if (cache_ != nullptr) std::exchange(cache_, nullptr)->DropPin(*std::exchange(entry_, nullptr), copies_);
}

// ---- pins ----

void AdjunctCache::AddPin(AdjunctEntry& entry) noexcept {
  if (entry.pins_++ > 0) return;
  lru_.Remove(entry);
  --evictable_;
}

AdjunctPin AdjunctCache::CopyPin(AdjunctEntry& entry, bool cold) noexcept {
  entry.copying_ = true;
  entry.cold_ = cold;
  entry.uses_then_ = entry.uses_;
  AddPin(entry);
  return AdjunctPin(this, &entry, true);
}

void AdjunctCache::DropPin(AdjunctEntry& entry, bool copies) noexcept {
  if (copies) entry.copying_ = false;
  if (--entry.pins_ > 0) return;
  if (!entry.found_) {
    std::erase_if(dropped_, [&](const auto& dropped) { return &dropped.mapped() == &entry; });
    return;
  }
  if (copies && entry.cold_ && entry.uses_ == entry.uses_then_) ListOf(entry).PushFront(entry);
  else ListOf(entry).PushBack(entry);
  ++evictable_;
}

bool AdjunctCache::Idle(const PageHash& hash) const noexcept {
  const auto found = entries_.find(hash);
  return found != entries_.end() && found->second.pins_ == 0;
}

int32_t AdjunctCache::Users(const PageHash& hash) const noexcept {
  const auto found = entries_.find(hash);
  return found == entries_.end() ? 0 : found->second.pins_;
}

AdjunctPin AdjunctCache::Pin(const PageHash& hash) noexcept {
  const auto found = entries_.find(hash);
  assert(found != entries_.end());
  AddPin(found->second);
  ++found->second.uses_;
  return AdjunctPin(this, &found->second);
}

AdjunctPin AdjunctCache::PinToCopy(const PageHash& hash, bool cold) noexcept {
  const auto found = entries_.find(hash);
  assert(found != entries_.end());
  return found->second.copying_ ? AdjunctPin() : CopyPin(found->second, cold);
}

// ---- coming and going ----

AdjunctPin AdjunctCache::Publish(const PageHash& hash, PageLease& page, const PageHash& parent, int32_t depth) {
  const auto [place, added] = entries_.try_emplace(hash);
  if (!added) return {};
  AdjunctEntry& entry = place->second;
  entry.hash_ = hash;
  entry.parent_ = parent;
  entry.depth_ = depth;
  entry.page_ = std::move(page);
  entry.pins_ = 1;
  entry.uses_ = 1;
  if (events_ != nullptr) events_->Stored(KvMedium::kDevice, hash, parent, depth, 0, {}, group_);
  return AdjunctPin(this, &entry);
}

void AdjunctCache::Drop(const PageHash& hash, bool record) noexcept {
  const auto found = entries_.find(hash);
  if (found == entries_.end()) return;
  AdjunctEntry& entry = found->second;
  if (record) Removed(entry);
  gone_.Add(hash);
  if (entry.pins_ > 0) {
    assert(entry.pins_ == 1 && entry.copying_ && "a page in use lost its block");
    entry.found_ = false;
    dropped_.push_back(entries_.extract(found));
    return;
  }
  lru_.Remove(entry);
  --evictable_;
  entries_.erase(found);
}

void AdjunctCache::DropIdle(bool record) {
  for (auto* list : {&behind_, &lru_, &kept_}) {
    while (!list->empty()) Drop(PageHash(list->front().hash_), record);
  }
  gone_.Clear();
}

void AdjunctCache::Warm(const PageHash& hash) noexcept {
  const auto found = entries_.find(hash);
  if (found == entries_.end()) return;
  ++found->second.uses_;
  Relist(hash);
}

PageLease AdjunctCache::Take() {
  assert(available() > 0);
  if (pool_.available() > 0) return pool_.Take();
  AdjunctEntry& coldest = !behind_.empty() ? behind_.front() : lru_.empty() ? kept_.front() : lru_.front();
  PageLease page = std::move(coldest.page_);
  Removed(coldest);
  lru_.Remove(coldest);
  --evictable_;
  ++evicted_;
  gone_.Add(coldest.hash_);
  entries_.erase(PageHash(coldest.hash_));  // a copy: the key must not die with its entry
  return page;
}

// ---- keeping ----

void AdjunctCache::Relist(const PageHash& hash) noexcept {
  const auto found = entries_.find(hash);
  if (found == entries_.end() || found->second.pins_ > 0) return;
  lru_.Remove(found->second);
  ListOf(found->second).PushBack(found->second);
}

bool AdjunctCache::Keep(const PageHash& hash) {
  if (++keepers_[hash] > 1) return false;
  Relist(hash);
  return true;
}

bool AdjunctCache::Unkeep(const PageHash& hash) noexcept {
  const auto found = keepers_.find(hash);
  assert(found != keepers_.end());
  if (--found->second > 0) return false;
  keepers_.erase(found);
  Relist(hash);
  return true;
}

// ---- checking ----

void AdjunctCache::Verify(const std::unordered_map<int32_t, int32_t>& pins) const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("adjunct cache: ") + what);
  };
  std::unordered_set<const AdjunctEntry*> cold;
  behind_.ForEach([&](const AdjunctEntry& entry) {
    require(cold.insert(&entry).second, "a page stands twice in the LRU lists");
    require(entry.uses_ == 1, "a page that was used again stands among those left behind");
    require(!keepers_.contains(entry.hash_), "a page that a session keeps stands among those left behind");
  });
  lru_.ForEach([&](const AdjunctEntry& entry) {
    require(cold.insert(&entry).second, "a page stands twice in the LRU lists");
    require(!keepers_.contains(entry.hash_), "a page that a session keeps stands among the others");
  });
  kept_.ForEach([&](const AdjunctEntry& entry) {
    require(cold.insert(&entry).second, "a page stands twice in the LRU lists");
    require(keepers_.contains(entry.hash_), "a page that no session keeps stands among those kept");
  });
  int32_t evictable = 0;
  size_t pinned = 0;
  for (const auto& [hash, entry] : entries_) {
    require(hash == entry.hash_, "a page stands under a wrong name");
    require(static_cast<bool>(entry.page_), "an entry has no page");
    const auto known = pins.find(entry.page_.id());
    require(entry.pins_ == (known == pins.end() ? 0 : known->second), "a page has other pins than its users say");
    require((entry.pins_ == 0) == cold.contains(&entry), "the LRU lists are not exactly the pages without a pin");
    evictable += entry.pins_ == 0 ? 1 : 0;
    pinned += entry.pins_ > 0 ? 1 : 0;
  }
  for (const auto& dropped : dropped_) {
    const AdjunctEntry& entry = dropped.mapped();
    const auto known = pins.find(entry.page_.id());
    require(!entry.found_ && known != pins.end() && entry.pins_ == known->second, "a dropped page that nobody reads is kept");
    ++pinned;
  }
  require(pinned == pins.size(), "a pin is on a page that is not known");
  require(evictable == evictable_ && cold.size() == static_cast<size_t>(evictable), "the count of evictable pages is wrong");
}

}  // namespace tokenspeed

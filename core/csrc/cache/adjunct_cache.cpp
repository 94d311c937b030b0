#include "cache/adjunct_cache.h"

#include <cassert>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace tokenspeed {

void AdjunctPin::Release() noexcept {
  if (cache_ != nullptr) std::exchange(cache_, nullptr)->DropPin(*std::exchange(entry_, nullptr));
}

void AdjunctCache::AddPin(AdjunctEntry& entry) noexcept {
  if (entry.pins_++ > 0) return;
  lru_.Remove(entry);
  --evictable_;
}

void AdjunctCache::DropPin(AdjunctEntry& entry) noexcept {
  if (--entry.pins_ > 0) return;
  lru_.PushBack(entry);
  ++evictable_;
}

bool AdjunctCache::Idle(const PageHash& hash) const noexcept {
  const auto found = entries_.find(hash);
  return found != entries_.end() && found->second.pins_ == 0;
}

AdjunctPin AdjunctCache::Pin(const PageHash& hash) noexcept {
  const auto found = entries_.find(hash);
  assert(found != entries_.end());
  AddPin(found->second);
  return AdjunctPin(this, &found->second);
}

AdjunctPin AdjunctCache::Publish(const PageHash& hash, PageLease& page) {
  const auto [place, added] = entries_.try_emplace(hash);
  if (!added) return {};
  AdjunctEntry& entry = place->second;
  entry.hash_ = hash;
  entry.page_ = std::move(page);
  entry.pins_ = 1;
  return AdjunctPin(this, &entry);
}

void AdjunctCache::Drop(const PageHash& hash) noexcept {
  const auto found = entries_.find(hash);
  if (found == entries_.end()) return;
  assert(found->second.pins_ == 0 && "a pinned page lost its block");
  lru_.Remove(found->second);
  --evictable_;
  entries_.erase(found);
}

PageLease AdjunctCache::Take() {
  assert(available() > 0);
  if (pool_.available() > 0) return pool_.Take();
  AdjunctEntry& coldest = lru_.front();
  PageLease page = std::move(coldest.page_);
  lru_.Remove(coldest);
  --evictable_;
  ++evicted_;
  evicted_pages_.Add(coldest.hash_);
  entries_.erase(PageHash(coldest.hash_));  // a copy: the key must not die with its entry
  return page;
}

void AdjunctCache::Verify(const std::unordered_map<int32_t, int32_t>& pins) const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("adjunct cache: ") + what);
  };
  std::unordered_set<const AdjunctEntry*> cold;
  lru_.ForEach([&](const AdjunctEntry& entry) { require(cold.insert(&entry).second, "a page stands twice in the LRU list"); });
  int32_t evictable = 0;
  size_t pinned = 0;
  for (const auto& [hash, entry] : entries_) {
    require(hash == entry.hash_, "a page stands under a wrong name");
    require(static_cast<bool>(entry.page_), "an entry has no page");
    const auto known = pins.find(entry.page_.id());
    require(entry.pins_ == (known == pins.end() ? 0 : known->second), "a page has other pins than its users say");
    require((entry.pins_ == 0) == cold.contains(&entry), "the LRU list is not exactly the pages without a pin");
    evictable += entry.pins_ == 0 ? 1 : 0;
    pinned += entry.pins_ > 0 ? 1 : 0;
  }
  require(pinned == pins.size(), "a pin is on a page that is not known");
  require(evictable == evictable_ && cold.size() == static_cast<size_t>(evictable), "the count of evictable pages is wrong");
}

}  // namespace tokenspeed

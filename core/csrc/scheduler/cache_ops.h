// Transfers between the tiers, and what each holds until it has been answered.
//
//     device  --write back-->  host  --store-->      store below
//             <--load back---        <--prefetch---  (asked first by a lookup)
//
// A page in transfer belongs to its transfer: on the device by a pin of its path (write back) or by its lease (load back), on the host
// by a HostPin. Pages of window and recurrent groups have ops of their own, each of one group: on the device a pin of their cache or a
// lease. So it is neither evicted nor used again before the answer, whatever becomes of the request that wanted it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "cache/adjunct_cache.h"
#include "cache/host_cache.h"
#include "cache/page_hash.h"
#include "cache/page_pool.h"
#include "cache/prefix_tree.h"
#include "scheduler/inflight_prefixes.h"

namespace tokenspeed {

// The request that wants a transfer. It may have left when that ends, and its id may have been given again.
struct RequestKey {
  int64_t id = -1;
  uint64_t arrival = ~uint64_t{0};  // of no request
  int64_t session = -1;             // a session that is brought up, and no request
  friend bool operator==(const RequestKey&, const RequestKey&) = default;
};

struct WriteBackOp {
  RequestKey owner;
  NodePin pin;
  uint64_t cold_since = 0;  // not 0: pinned by PinCold
  std::vector<HostPin> host;
};
struct LoadBackOp {
  RequestKey owner;
  std::vector<HostPin> host;
  std::vector<PageLease> device;
  // Without a request (a session brought up): where the pages go in the tree, and the claim that makes others wait for them.
  NodePin pin;
  std::vector<PageHash> hashes;
  std::vector<int32_t> tokens;  // of `hashes`, where events tell of them
  int64_t adapter = 0;
  PrefixClaim claim;
  int64_t session = -1;  // to be brought up in the other groups as well
};
struct AdjunctWriteOp {
  RequestKey owner;
  size_t place;  // of the group among the window and recurrent ones
  std::vector<AdjunctPin> device;
  std::vector<HostPin> host;
};
struct AdjunctLoadOp {
  RequestKey owner;
  size_t place;
  std::vector<int32_t> blocks;  // that the pages belong to; a state to the last one before it
  std::vector<HostPin> host;
  std::vector<PageLease> device;
  // Without a request (a session brought up): keeps the blocks, and names them and those before.
  NodePin pin;
  std::vector<std::pair<PageHash, PageHash>> hashes;
};
// Below, `tier`: whose pages; 0 those of the full groups, else one more than the group's place among the window and recurrent ones.
struct LookupOp {
  int64_t fetch = -1;
  size_t tier = 0;
  std::vector<int32_t> blocks;  // in the order in which it asks for them
};
struct PrefetchOp {
  size_t tier = 0;
  std::vector<HostPin> host;
  std::vector<int64_t> fetches;  // wait for pages of it
};
struct StoreOp {
  size_t tier = 0;
  std::vector<HostPin> host;
};
using CacheOp = std::variant<WriteBackOp, LoadBackOp, AdjunctWriteOp, AdjunctLoadOp, LookupOp, PrefetchOp, StoreOp>;

[[nodiscard]] inline int32_t PagesOf(const CacheOp& op) {
  return std::visit(
      [](const auto& concrete) {
        if constexpr (requires { concrete.host; }) return static_cast<int32_t>(concrete.host.size());
        else return static_cast<int32_t>(concrete.blocks.size());
      },
      op);
}

}  // namespace tokenspeed

// Device KV pages of one cache group: ids 0..total-1, each either free in the pool or named by exactly one PageLease.
#pragma once

#include "support/id_pool.h"

namespace tokenspeed {

struct PageTag;
using PagePool = IdPool<PageTag>;
// Whoever holds it may have the page written; its destructor makes the page free. A page that can be shared stands in the prefix
// tree, which then holds the lease.
using PageLease = IdLease<PageTag>;

}  // namespace tokenspeed

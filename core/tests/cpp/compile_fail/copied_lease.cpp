// A page has one owner: its lease moves and is never copied.
#include "cache/page_pool.h"

namespace tokenspeed {
PageLease Moved(PageLease& lease) { return std::move(lease); }
#ifdef ILLEGAL
PageLease Copied(PageLease& lease) { return lease; }
#endif
}  // namespace tokenspeed

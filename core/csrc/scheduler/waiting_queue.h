// Requests that wait for admission, in serving order. Neither a plan nor a submission walks it: O(log n) in and out.
#pragma once

#include <map>

#include "scheduler/request.h"

namespace tokenspeed {

// Owns nothing. A request stands in it from its submission (or retraction) to its admission, except while it is parked on a prefix
// that another request is computing.
using RequestsInOrder = std::map<QueueKey, Request*>;

}  // namespace tokenspeed

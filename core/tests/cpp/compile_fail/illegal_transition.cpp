// A request that waits cannot be retracted: there is no such transition.
#include "scheduler/transitions.h"

namespace tokenspeed {
RequestState Legal(Decoding state) { return On(std::move(state), Retract{}); }
#ifdef ILLEGAL
RequestState Illegal(Submitted state) { return On(std::move(state), Retract{}); }
#endif
}  // namespace tokenspeed

// A state owns what it holds: it is handed over, never copied, into a transition.
#include "scheduler/transitions.h"

namespace tokenspeed {
Finished Moved(Decoding& state) { return On(std::move(state), Abort{}); }
#ifdef ILLEGAL
Finished Copied(Decoding& state) { return On(state, Abort{}); }
#endif
}  // namespace tokenspeed

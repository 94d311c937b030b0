#include "bindings/bindings.h"

PYBIND11_MODULE(_scheduler, module) {
  module.doc() = "The scheduler of TokenSpeed: request life cycle, KV page ownership, prefix cache, and what runs next.";
  tokenspeed::bindings::BindConfig(module);
  tokenspeed::bindings::BindRequests(module);
  tokenspeed::bindings::BindPlan(module);
  tokenspeed::bindings::BindScheduler(module);
}

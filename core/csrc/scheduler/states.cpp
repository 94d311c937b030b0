#include "scheduler/states.h"

namespace tokenspeed {

Residence* ResidenceOf(RequestState& state) noexcept {
  return std::visit(
      [](auto& concrete) -> Residence* {
        if constexpr (requires { concrete.residence; }) return concrete.residence.slot ? &concrete.residence : nullptr;
        else return nullptr;
      },
      state);
}

}  // namespace tokenspeed

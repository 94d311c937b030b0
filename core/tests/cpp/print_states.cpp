// Prints the table of transitions that docs/scheduler-states.md holds.
#include <cstdio>
#include <string>

#include "scheduler/transitions.h"

int main() {
  using namespace tokenspeed;
  const TransitionTable table = MakeTransitionTable();
  std::printf("| state |");
  for (const auto event : kEventNames) std::printf(" %s |", std::string(event).c_str());
  std::printf("\n| --- |");
  for (size_t e = 0; e < kEventCount; ++e) std::printf(" --- |");
  std::printf("\n");
  for (size_t s = 0; s < kStateCount; ++s) {
    std::printf("| %s |", std::string(kStateNames[s]).c_str());
    for (size_t e = 0; e < kEventCount; ++e) {
      std::printf(" %s |", table[s][e] < 0 ? "" : std::string(kStateNames[static_cast<size_t>(table[s][e])]).c_str());
    }
    std::printf("\n");
  }
}

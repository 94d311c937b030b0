#include "scheduler/transitions.h"

namespace tokenspeed {
namespace {

template <class State, class Event>
constexpr int32_t NextState() {
  if constexpr (Transition<State, Event>) {
    return static_cast<int32_t>(kStateIndex<decltype(On(std::declval<State>(), std::declval<Event>()))>);
  } else {
    return -1;
  }
}

template <size_t S, size_t... E>
constexpr std::array<int32_t, kEventCount> Row(std::index_sequence<E...>) {
  return {NextState<std::variant_alternative_t<S, RequestState>, std::variant_alternative_t<E, AllEvents>>()...};
}

template <size_t... S>
constexpr TransitionTable Table(std::index_sequence<S...>) {
  return {Row<S>(std::make_index_sequence<kEventCount>())...};
}

}  // namespace

TransitionTable MakeTransitionTable() { return Table(std::make_index_sequence<kStateCount>()); }

}  // namespace tokenspeed

// The transitions of a request: one overload of On for each that exists, taking the state by value and returning the next. A
// transition that does not exist does not compile (tests/cpp/compile_fail), and what the next state does not take over is given
// back when the old one ends here.
#pragma once

#include <array>
#include <concepts>
#include <string_view>
#include <type_traits>
#include <utility>

#include "scheduler/states.h"

namespace tokenspeed {

// ---- events ----

struct Admit {
  Residence residence;
  PrefixClaim claim;
  int32_t target;
};
struct AskStore {};       // the store below may have its prefix
struct StoreAnswered {};  // what it has is on the host, or it was not to be had in time
struct PromptPlanned {};  // the last chunk of the prompt stands in a plan
struct FirstToken {};     // the step with the last chunk was advanced
struct Retract {};        // REQUIRES: no step of it in flight, nothing of it being copied to the host
struct RetractLater {};   // the same, while its pages are being copied to the host
struct Reload {};         // its prefix did not come back from the host; no step of it in flight
struct ReloadInFlight {}; // the same, with a later step of it in flight
struct Released {};       // the last step of it, or the last copy of its pages to the host, has ended
struct End {              // no step of it in flight any more
  FinishReason reason;
};
struct EndWriting {  // no step of it in flight, and its pages are being copied to the host
  FinishReason reason;
};
struct EndInFlight {  // a later step of it is in flight
  FinishReason reason;
};
struct Abort {            // no step of it in flight
  FinishReason reason = FinishReason::kAborted;
};
struct AbortInFlight {
  FinishReason reason = FinishReason::kAborted;
};
struct StepEnded {};      // the last step in flight was advanced
struct StepEndedWriting {};  // the same, while its pages are being copied to the host

// ---- transitions ----

[[nodiscard]] inline Prefilling On(Submitted, Admit event) { return {std::move(event.residence), std::move(event.claim), event.target}; }
[[nodiscard]] inline Prefetching On(Submitted, AskStore) { return {}; }
[[nodiscard]] inline PrefetchDone On(Prefetching, StoreAnswered) { return {}; }
[[nodiscard]] inline Prefilling On(PrefetchDone, Admit event) { return {std::move(event.residence), std::move(event.claim), event.target}; }
[[nodiscard]] inline Prefilling On(Retracted, Admit event) { return {std::move(event.residence), std::move(event.claim), event.target}; }

[[nodiscard]] inline PrefillDone On(Prefilling state, PromptPlanned) { return {std::move(state.residence), std::move(state.claim)}; }
[[nodiscard]] inline Decoding On(PrefillDone state, FirstToken) { return {std::move(state.residence)}; }

[[nodiscard]] inline Retracted On(Prefilling, Retract) { return {}; }
[[nodiscard]] inline Retracted On(Decoding, Retract) { return {}; }
[[nodiscard]] inline Retracting On(Prefilling, RetractLater) { return {}; }
[[nodiscard]] inline Retracting On(Decoding, RetractLater) { return {}; }
[[nodiscard]] inline Retracted On(Prefilling, Reload) { return {}; }
[[nodiscard]] inline Retracted On(PrefillDone, Reload) { return {}; }
[[nodiscard]] inline Retracting On(Prefilling state, ReloadInFlight) { return {std::move(state.residence)}; }
[[nodiscard]] inline Retracting On(PrefillDone state, ReloadInFlight) { return {std::move(state.residence)}; }
[[nodiscard]] inline Retracted On(Retracting, Released) { return {}; }

[[nodiscard]] inline Finished On(Prefilling, End event) { return {event.reason}; }
[[nodiscard]] inline Finished On(PrefillDone, End event) { return {event.reason}; }
[[nodiscard]] inline Finished On(Decoding, End event) { return {event.reason}; }
[[nodiscard]] inline WritingBack On(Prefilling, EndWriting event) { return {event.reason}; }
[[nodiscard]] inline WritingBack On(PrefillDone, EndWriting event) { return {event.reason}; }
[[nodiscard]] inline WritingBack On(Decoding, EndWriting event) { return {event.reason}; }
[[nodiscard]] inline Finished On(WritingBack state, Released) { return {state.reason}; }
[[nodiscard]] inline Draining On(Prefilling state, EndInFlight event) { return {std::move(state.residence), event.reason}; }
[[nodiscard]] inline Draining On(PrefillDone state, EndInFlight event) { return {std::move(state.residence), event.reason}; }
[[nodiscard]] inline Draining On(Decoding state, EndInFlight event) { return {std::move(state.residence), event.reason}; }

[[nodiscard]] inline Finished On(Submitted, Abort event) { return {event.reason}; }
[[nodiscard]] inline Finished On(Prefetching, Abort event) { return {event.reason}; }
[[nodiscard]] inline Finished On(PrefetchDone, Abort event) { return {event.reason}; }
[[nodiscard]] inline Finished On(Retracting, Abort event) { return {event.reason}; }
[[nodiscard]] inline Aborting On(Retracting state, AbortInFlight event) { return {std::move(state.residence), event.reason}; }
[[nodiscard]] inline Finished On(Prefilling, Abort event) { return {event.reason}; }
[[nodiscard]] inline Finished On(Decoding, Abort event) { return {event.reason}; }
[[nodiscard]] inline Finished On(Retracted, Abort event) { return {event.reason}; }
[[nodiscard]] inline Aborting On(Prefilling state, AbortInFlight event) { return {std::move(state.residence), event.reason}; }
[[nodiscard]] inline Aborting On(PrefillDone state, AbortInFlight event) { return {std::move(state.residence), event.reason}; }
[[nodiscard]] inline Aborting On(Decoding state, AbortInFlight event) { return {std::move(state.residence), event.reason}; }

[[nodiscard]] inline Finished On(Draining state, StepEnded) { return {state.reason}; }
[[nodiscard]] inline WritingBack On(Draining state, StepEndedWriting) { return {state.reason}; }
[[nodiscard]] inline Finished On(Aborting state, StepEnded) { return {state.reason}; }

// ---- dispatch ----

template <class State, class Event>
concept Transition = requires(State state, Event event) { On(std::move(state), std::move(event)); };

using AllEvents = std::variant<AskStore, StoreAnswered, Admit, PromptPlanned, FirstToken, Retract, RetractLater, Reload, ReloadInFlight, Released,
                               End, EndWriting, EndInFlight, Abort, AbortInFlight, StepEnded, StepEndedWriting>;
inline constexpr size_t kEventCount = std::variant_size_v<AllEvents>;
inline constexpr std::string_view kEventNames[kEventCount] = {
    "AskStore", "StoreAnswered", "Admit",      "PromptPlanned", "FirstToken", "Retract",       "RetractLater", "Reload",          "ReloadInFlight",
    "Released", "End",           "EndWriting", "EndInFlight",   "Abort",      "AbortInFlight", "StepEnded",    "StepEndedWriting"};

template <class T, class Variant>
struct IndexOf;
template <class T, class... Alternatives>
struct IndexOf<T, std::variant<Alternatives...>> {
  static constexpr size_t value = [] {
    size_t index = 0;
    (void)((std::is_same_v<T, Alternatives> || (++index, false)) || ...);
    return index;
  }();
};
template <class State>
inline constexpr size_t kStateIndex = IndexOf<State, RequestState>::value;
template <class Event>
inline constexpr size_t kEventIndex = IndexOf<Event, AllEvents>::value;

// How often each transition was taken.
using TransitionCounts = std::array<std::array<int64_t, kEventCount>, kStateCount>;

// Takes the transition of the state that the variant holds. False, with nothing changed, where there is none.
template <class Event>
[[nodiscard]] bool Dispatch(RequestState& state, Event event) {
  return std::visit(
      [&]<class State>(State& concrete) {
        if constexpr (Transition<State, Event>) {
          RequestState next = On(std::move(concrete), std::move(event));
          state = std::move(next);
          return true;
        } else {
          return false;
        }
      },
      state);
}

// For each state and event the index of the next state, or -1: what docs/scheduler-states.md shows.
using TransitionTable = std::array<std::array<int32_t, kEventCount>, kStateCount>;
[[nodiscard]] TransitionTable MakeTransitionTable();

}  // namespace tokenspeed

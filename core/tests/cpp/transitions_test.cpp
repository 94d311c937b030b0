#include "scheduler/transitions.h"

#include <gtest/gtest.h>

#include <type_traits>

namespace tokenspeed {
namespace {

static_assert(!std::is_copy_constructible_v<Prefilling> && std::is_nothrow_move_constructible_v<Prefilling>);
static_assert(!std::is_copy_constructible_v<Decoding> && std::is_nothrow_move_constructible_v<Decoding>);
static_assert(!std::is_copy_constructible_v<PageLease> && !std::is_copy_constructible_v<NodePin> && !std::is_copy_constructible_v<PrefixClaim>);
static_assert(Transition<Submitted, Admit> && !Transition<Submitted, Retract> && !Transition<Finished, Abort>);
static_assert(!Transition<PrefillDone, Retract> && !Transition<PrefillDone, Abort>, "its last chunk is in flight");

class TransitionsTest : public testing::Test {
 protected:
  Residence MakeResidence() {
    Residence residence{slots.Take(), tree.PinRoot(), {}, 0, {}};
    residence.tail.push_back(pages.Take());
    return residence;
  }
  void ExpectHeld(int32_t count) const {
    EXPECT_EQ(pages.total() - pages.available(), count);
    EXPECT_EQ(slots.total() - slots.available(), count);
  }

  PagePool pages{4};
  SlotPool slots{2};
  PrefixTree tree;
};

TEST_F(TransitionsTest, ResourcesMoveWithTheStateAndComeBackWhenItEnds) {
  RequestState state = Submitted{};
  ASSERT_TRUE(Dispatch(state, Admit{MakeResidence(), {}, 5}));
  ExpectHeld(1);
  ASSERT_TRUE(Dispatch(state, PromptPlanned{}));
  ASSERT_TRUE(Dispatch(state, FirstToken{}));
  ExpectHeld(1);
  ASSERT_TRUE(Dispatch(state, EndInFlight{FinishReason::kStop}));
  ExpectHeld(1);  // the step in flight still reads them
  ASSERT_TRUE(Dispatch(state, StepEnded{}));
  ExpectHeld(0);
  EXPECT_EQ(std::get<Finished>(state).reason, FinishReason::kStop);
}

TEST_F(TransitionsTest, RetractionGivesEverythingBackAtOnce) {
  RequestState state = Decoding{MakeResidence()};
  ExpectHeld(1);
  ASSERT_TRUE(Dispatch(state, Retract{}));
  ExpectHeld(0);
  ASSERT_TRUE(Dispatch(state, Admit{MakeResidence(), {}, 9}));
  EXPECT_EQ(std::get<Prefilling>(state).target, 9);
}

TEST_F(TransitionsTest, AnEventWithoutATransitionChangesNothing) {
  RequestState state = Draining{MakeResidence(), FinishReason::kLength};
  EXPECT_FALSE(Dispatch(state, AbortInFlight{}));
  EXPECT_FALSE(Dispatch(state, Retract{}));
  EXPECT_EQ(NameOf(state), StateName::kDraining);
  ExpectHeld(1);
  ASSERT_TRUE(Dispatch(state, StepEnded{}));
  EXPECT_EQ(std::get<Finished>(state).reason, FinishReason::kLength);
  EXPECT_FALSE(Dispatch(state, Abort{}));
}

TEST_F(TransitionsTest, EveryStateIsReachedAndOnlyFinishedIsFinal) {
  const TransitionTable table = MakeTransitionTable();
  std::array<bool, kStateCount> reached{};
  reached[0] = true;
  for (size_t s = 0; s < kStateCount; ++s) {
    int out = 0;
    for (const int32_t next : table[s]) {
      if (next < 0) continue;
      ++out;
      reached[static_cast<size_t>(next)] = true;
    }
    EXPECT_EQ(out == 0, s == static_cast<size_t>(StateName::kFinished));
  }
  for (const bool r : reached) EXPECT_TRUE(r);
}

}  // namespace
}  // namespace tokenspeed

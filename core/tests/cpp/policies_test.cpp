#include "scheduler/policies.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "scheduler/observations.h"

namespace tokenspeed {
namespace {

TEST(AdmissionPolicies, ExpectedOutputIsNeitherNothingNorTheWorstCase) {
  const ExpectedOutput expected;
  EXPECT_EQ(expected(0, 10'000, 100), 100);
  EXPECT_EQ(expected(60, 10'000, 100), 40);
  EXPECT_EQ(expected(500, 10'000, 100), 25);  // outlived the mean: a quarter of it again
  EXPECT_EQ(expected(0, 8, 100), 8);
  EXPECT_EQ(expected(3, 10, 1), 1);
  EXPECT_EQ(WholeOutput()(3, 10, 1), 7);
}

TEST(RetractionPolicies, RankByCostOrByAge) {
  const RetractionCandidate cheap{10, 1}, dear{500, 2};
  EXPECT_LT(CheapestToRestore()(cheap), CheapestToRestore()(dear));
  EXPECT_LT(Youngest()(dear), Youngest()(cheap));
  EXPECT_TRUE(std::holds_alternative<Youngest>(MakeRetractionPolicy(RetractionRule::kYoungest)));
  EXPECT_TRUE(std::holds_alternative<CheapestToRestore>(MakeRetractionPolicy(RetractionRule::kCheapestToRestore)));
  EXPECT_TRUE(std::holds_alternative<WholeOutput>(MakeAdmissionPolicy(AdmissionRule::kWholeOutput)));
}

TEST(OutputLengths, FollowWhatIsObserved) {
  OutputLengths lengths;
  EXPECT_EQ(lengths.Mean(), 256);
  lengths.Observe(40);
  EXPECT_EQ(lengths.Mean(), 40);
  for (int i = 0; i < 200; ++i) lengths.Observe(1'000);
  EXPECT_NEAR(lengths.Mean(), 1'000, 10);
  for (int i = 0; i < 400; ++i) lengths.Observe(0);
  EXPECT_EQ(lengths.Mean(), 1);
}

// A device that takes 5 ms for decodes, 20 us for a prompt token and 1 ns for each that it attends to.
constexpr double kDecodesUs = 5'000.0;
int64_t TimeOf(int32_t tokens, int32_t context) {
  return static_cast<int64_t>(kDecodesUs + 20.0 * tokens + 0.001 * PrefillCost::Attended(tokens, context));
}
void ObserveChunk(StepTimes& times, int32_t tokens, int32_t context) {
  times.Observe(tokens, PrefillCost::Attended(tokens, context), 8, true, TimeOf(tokens, context));
}
void ObserveDecodes(StepTimes& times, int steps, int64_t us = 5'000) {
  for (int i = 0; i < steps; ++i) times.Observe(0, 0.0, 8, false, us);
}
// How long a step is for which `times` say that it takes 20 ms, behind `context`.
double TrueTime(const StepTimes& times, int32_t context) {
  PrefillCost cost;
  cost.Follow(times.weight());
  const int64_t tokens = cost.TokensFor(times.PrefillCostWithin(20'000, 64), context);
  return static_cast<double>(TimeOf(static_cast<int32_t>(tokens), context));
}
StepTimes Learnt() {
  StepTimes times;
  for (int prompt = 0; prompt < 4; ++prompt) {
    ObserveDecodes(times, 30);
    for (int32_t context = 0; context < 8'000; context += 500) ObserveChunk(times, 500, context);
  }
  return times;
}

TEST(StepTimes, FeelTheWayUntilStepsWereTimed) {
  StepTimes times;
  EXPECT_EQ(times.PrefillCostWithin(20'000, 64), 64.0);
  times.Observe(3, 4.5, 0, true, 90'000);  // no decodes: tells nothing of them
  times.Observe(3, 4.5, 8, true, 0);       // not timed
  EXPECT_EQ(times.PrefillCostWithin(20'000, 64), 64.0);
  ObserveDecodes(times, 1);
  EXPECT_EQ(times.PrefillCostWithin(20'000, 64), 64.0);
  EXPECT_EQ(times.PrefillCostWithin(4'000, 64), 0.0);
  for (int32_t tokens = 64; tokens <= 512; tokens *= 2) {
    ObserveChunk(times, tokens, 0);
    EXPECT_LE(times.PrefillCostWithin(1'000'000, 64), 2.0 * tokens);
  }
  EXPECT_NEAR(TrueTime(times, 0), 20'000, 400);
}

TEST(StepTimes, PredictChunksBehindAnyContext) {
  const StepTimes times = Learnt();
  for (const int32_t context : {0, 2'000, 4'000, 8'000, 16'000}) EXPECT_NEAR(TrueTime(times, context), 20'000, 400) << context;
  EXPECT_NEAR(times.weight(), 0.001 / 20.0, 0.000'005);
}

TEST(StepTimes, ForgetNothingOfPromptsInStepsWithoutThem) {
  StepTimes times = Learnt();
  ObserveDecodes(times, 1'000);
  EXPECT_NEAR(TrueTime(times, 0), 20'000, 400);
  EXPECT_NEAR(TrueTime(times, 8'000), 20'000, 400);
}

TEST(StepTimes, HardlyHearAStepOutOfLine) {
  for (const int32_t tokens : {0, 500}) {
    StepTimes times = Learnt();
    times.Observe(tokens, PrefillCost::Attended(tokens, 0), 8, tokens > 0, 10'000'000);  // a compilation
    EXPECT_NEAR(TrueTime(times, 0), 20'000, 2'000) << tokens;
    ObserveDecodes(times, 20);
    for (int i = 0; i < 4; ++i) ObserveChunk(times, 500, 0);
    EXPECT_NEAR(TrueTime(times, 0), 20'000, 600) << tokens;
  }
  StepTimes times;  // the very first one
  ObserveDecodes(times, 1, 10'000'000);
  ObserveDecodes(times, 40);
  for (int32_t context = 0; context < 4'000; context += 500) ObserveChunk(times, 500, context);
  EXPECT_NEAR(TrueTime(times, 0), 20'000, 600);
}

TEST(StepTimes, BelieveSoonThatTimesHaveChanged) {
  StepTimes times = Learnt();
  ObserveDecodes(times, 10, 12'000);
  const double tokens = times.PrefillCostWithin(20'000, 64);
  EXPECT_NEAR(12'000 + 20.0 * tokens, 20'000, 600);
}

TEST(StepTimes, LearnNothingOfATokenFromStepsWithFew) {
  StepTimes times = Learnt();
  for (int i = 0; i < 300; ++i) times.Observe(16, PrefillCost::Attended(16, 0), 8, false, 5'000);  // for nothing, beside the weights
  ObserveDecodes(times, 20);
  EXPECT_NEAR(TrueTime(times, 0), 20'000, 400);
}

TEST(StepTimes, HoldOutWhereTimesAreSenseless) {
  StepTimes times;
  uint32_t state = 1;
  for (int i = 0; i < 20'000; ++i) {
    state = state * 1'664'525u + 1'013'904'223u;
    const auto draw = [&](uint32_t shift, uint32_t bound) { return static_cast<int32_t>((state >> shift) % bound); };
    const int32_t tokens = draw(3, 3) == 0 ? 0 : draw(5, 8'192);
    times.Observe(tokens, PrefillCost::Attended(tokens, draw(9, 30'000)), 1 + draw(13, 256), draw(7, 2) == 0, 1 + draw(0, 1u << (i % 30)));
    const double cost = times.PrefillCostWithin(20'000, 64);
    ASSERT_TRUE(cost >= 0.0 && cost <= 20'000.0) << i;
    ASSERT_TRUE(times.weight() >= 0.0 && times.weight() < 1e12) << i;
  }
}

// Steps of 248 prompt tokens each 248 behind the last, which take `token_us` and `pair_us` for each pair of tokens that attend.
void ObserveLongPrompt(PrefillCost& cost, double token_us, double pair_us, double decodes_us) {
  for (int32_t context = 0; context < 3'000; context += 248) {
    const double attended = PrefillCost::Attended(248, context);
    cost.Observe(248, attended, 8, true, static_cast<int64_t>(decodes_us + token_us * 248 + pair_us * attended));
  }
}

TEST(PrefillCost, IsTheTokensUntilStepsWereTimed) {
  const PrefillCost cost;
  EXPECT_EQ(cost.weight(), 0.0);
  EXPECT_EQ(cost(100, PrefillCost::Attended(100, 5'000)), 100.0);
  EXPECT_EQ(cost.TokensFor(100.0, 5'000), 100);
  EXPECT_EQ(cost.TokensFor(PrefillCost::kUnbounded, 5'000), int64_t{1} << 30);
}

TEST(PrefillCost, LearnsTheWeightOfContextAndNotThatOfTheDecodesBeside) {
  PrefillCost cost;
  for (int i = 0; i < 5; ++i) cost.Observe(0, 0.0, 8, false, 42'000);
  for (int i = 0; i < 4; ++i) ObserveLongPrompt(cost, 3'700, 1.0, 42'000);
  EXPECT_NEAR(cost.weight() * 3'700, 1.0, 0.12);
  const auto short_prompts = [&](int steps) {
    for (int i = 0; i < steps; ++i) cost.Observe(250, PrefillCost::Attended(250, 0), 8, true, 42'000 + 3'700 * 250);
  };
  short_prompts(200);
  EXPECT_NEAR(cost.weight() * 3'700, 1.0, 0.2);
  const double before = cost.weight();
  short_prompts(100);
  EXPECT_EQ(cost.weight(), before);  // contexts all alike
  cost.Observe(16, PrefillCost::Attended(16, 9'000), 8, false, 900'000);
  cost.Observe(248, PrefillCost::Attended(248, 9'000), 8, true, 0);
  EXPECT_EQ(cost.weight(), before);  // not filled; not timed
}

TEST(PrefillCost, AChunkBehindContextCostsWhatAChunkWithoutDoes) {
  PrefillCost cost;
  ObserveLongPrompt(cost, 3'700, 1.0, 0);
  const double whole = cost(248, PrefillCost::Attended(248, 0));
  EXPECT_EQ(cost.TokensFor(whole, 0), 248);
  int64_t last = 249;
  for (const int32_t context : {0, 1'000, 10'000, 1'000'000}) {
    const int64_t tokens = cost.TokensFor(whole, context);
    EXPECT_LT(tokens, last);
    EXPECT_NEAR(cost(tokens, PrefillCost::Attended(static_cast<int32_t>(tokens), context)), whole, 0.6 * (1.0 + cost.weight() * context));
    last = tokens;
  }
}

TEST(PrefillCost, ContextThatCostsLessThanNothingCostsNothing) {
  PrefillCost cost;
  ObserveLongPrompt(cost, 3'700, -0.5, 0);
  EXPECT_EQ(cost.weight(), 0.0);
}

TEST(PrefillCost, AWeightThatCutsTheChunksIsNotConfirmedByTimesThatDoNotDependOnThem) {
  PrefillCost cost;
  ObserveLongPrompt(cost, 3'700, 1.0, 0);
  const double first = cost.weight();
  for (int prompt = 0; prompt < 40; ++prompt) {
    for (int32_t context = 0; context < 3'000; context += 248) {
      const auto tokens = static_cast<int32_t>(cost.TokensFor(248.0, context));
      cost.Observe(tokens, PrefillCost::Attended(tokens, context), 8, true, 1'000'000);
    }
  }
  EXPECT_LT(cost.weight(), first / 2);
}

TEST(PrefillShare, IsSpentByTokensAndByCost) {
  PrefillCost cost;
  ObserveLongPrompt(cost, 3'700, 1.0, 0);
  PrefillShare share{248, cost(248, PrefillCost::Attended(248, 0)), 16};
  const int32_t fitting = share.Fit(1'000, 3'000, cost);
  EXPECT_LT(fitting, 248);
  share.Spend(fitting, fitting, 1'000, 3'000, cost);
  EXPECT_TRUE(share.used_up());  // no crumb is left over from rounding

  PrefillShare poor{248, 0.0, 16};
  EXPECT_EQ(poor.Fit(1'000, 3'000, cost), 16);
  poor.Spend(10, 10, 10, 0, cost);
  EXPECT_FALSE(poor.used_up());
  EXPECT_EQ(poor.Fit(1'000, 0, cost), 6);

  const PrefillShare alone{.tokens = 256};
  EXPECT_EQ(alone.Fit(1'000, 100'000, cost), 256);
}

TEST(PrefillShare, IsCutToWhatFillsAStep) {
  SchedulerConfig config;
  config.step_sizes = {32, 64, 128};
  const PrefillCost cost;
  PrefillShare share{.tokens = 1'000, .cost = 100.0, .least = 16, .sizes = &config};
  EXPECT_EQ(share.Fit(500, 0, cost), 64);  // not the 100 that fit, which would be filled up to 128
  EXPECT_EQ(share.Fit(50, 0, cost), 50);
  share.Spend(50, 50, 50, 0, cost);
  EXPECT_EQ(share.Fit(500, 0, cost), 14);  // the places that are computed anyway
  share.Spend(14, 14, 500, 0, cost);
  EXPECT_TRUE(share.used_up());

  PrefillShare over{.tokens = 1'000, .cost = 100.0, .least = 16, .sizes = &config};
  over.Spend(90, 90, 90, 0, cost);  // the end of a prompt: 128 are computed
  EXPECT_FALSE(over.used_up());
  EXPECT_EQ(over.Fit(500, 0, cost), 38);

  const PrefillShare small{.tokens = 1'000, .cost = 20.0, .least = 16, .sizes = &config};
  EXPECT_EQ(small.Fit(500, 0, cost), 20);  // no size is so small
  const PrefillShare large{.tokens = 1'000, .cost = 300.0, .least = 16, .sizes = &config};
  EXPECT_EQ(large.Fit(500, 0, cost), 300);  // beyond the sizes nothing is filled up

  PrefillShare full{.tokens = 40, .cost = 60.0, .least = 1, .sizes = &config};
  full.Spend(35, 35, 35, 0, cost);
  full.cost = 3.0;
  EXPECT_EQ(full.Fit(500, 0, cost), 5);  // 64 are computed, and the step's buffers hold 40
}

TEST(Config, NamesTheBadField) {
  SchedulerConfig config;
  config.groups = {{4, 8, CacheGroupKind::kFull}};
  config.max_num_seqs = 2;
  config.max_batched_tokens = 8;
  config.max_model_len = 64;
  EXPECT_NO_THROW(config.Validate());
  const auto message = [](SchedulerConfig bad) -> std::string {
    try {
      bad.Validate();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  SchedulerConfig bad = config;
  bad.groups.clear();
  EXPECT_NE(message(bad).find("groups"), std::string::npos);
  bad = config;
  bad.groups[0].num_pages = 0;
  EXPECT_NE(message(bad).find("groups[0].num_pages"), std::string::npos);
  bad = config;
  bad.overlap_depth = 2;
  EXPECT_NE(message(bad).find("overlap_depth is 2"), std::string::npos);
  EXPECT_EQ(config.max_step_tokens(), 8);
  config.max_num_seqs = 100;
  EXPECT_EQ(config.max_step_tokens(), 104);
}

}  // namespace
}  // namespace tokenspeed

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

TEST(StepTimes, PredictThePrefillThatFits) {
  StepTimes times;
  EXPECT_EQ(times.PrefillCostWithin(20'000, 64), 64);
  times.Observe(3, 0, 90'000);  // no decodes: tells nothing of them
  EXPECT_EQ(times.PrefillCostWithin(20'000, 64), 64);
  times.Observe(64, 8, 8'200);  // one kind of step: no slope yet, so a little more
  EXPECT_EQ(times.PrefillCostWithin(20'000, 64), 80);
  EXPECT_EQ(times.PrefillCostWithin(8'000, 16), 32);
  for (int i = 0; i < 100; ++i) {
    times.Observe(0, 8, 5'000);
    times.Observe(100, 8, 5'000 + 100 * 50);
  }
  EXPECT_NEAR(static_cast<double>(times.PrefillCostWithin(20'000, 64)), 300.0, 5.0);
  EXPECT_EQ(times.PrefillCostWithin(4'000, 64), 0);
  times.Observe(100, 8, 0);  // not measured
  EXPECT_NEAR(static_cast<double>(times.PrefillCostWithin(20'000, 64)), 300.0, 5.0);
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

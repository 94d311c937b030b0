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
  EXPECT_EQ(times.PrefillTokensWithin(20'000, 64), 64);
  times.Observe(3, 0, 90'000);  // no decodes: tells nothing of them
  EXPECT_EQ(times.PrefillTokensWithin(20'000, 64), 64);
  times.Observe(64, 8, 8'200);  // one kind of step: no slope yet, so a little more
  EXPECT_EQ(times.PrefillTokensWithin(20'000, 64), 80);
  EXPECT_EQ(times.PrefillTokensWithin(8'000, 16), 32);
  for (int i = 0; i < 100; ++i) {
    times.Observe(0, 8, 5'000);
    times.Observe(100, 8, 5'000 + 100 * 50);
  }
  EXPECT_NEAR(static_cast<double>(times.PrefillTokensWithin(20'000, 64)), 300.0, 5.0);
  EXPECT_EQ(times.PrefillTokensWithin(4'000, 64), 0);
  times.Observe(100, 8, 0);  // not measured
  EXPECT_NEAR(static_cast<double>(times.PrefillTokensWithin(20'000, 64)), 300.0, 5.0);
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

#include "scheduler/execution_plan.h"

namespace tokenspeed {

void ExecutionPlan::Reserve(const SchedulerConfig& config) {
  const auto rows = static_cast<size_t>(config.max_num_seqs);
  request_ids.Reserve(rows);
  for (Column<int32_t>* column : {&slots, &context_lens, &query_lens, &flags, &output_lens}) column->Reserve(rows);
  for (Column<int32_t>* column : {&delta_group, &delta_slot, &delta_index, &delta_page}) column->Reserve(2 * rows);
  prefix_intervals.Reserve(rows);
  input_ids.Reserve(static_cast<size_t>(config.max_step_tokens()));
}

void ExecutionPlan::Clear(int64_t id) {
  plan_id = id;
  mode = ForwardMode::kIdle;
  num_extend_rows = 0;
  request_ids.Clear();
  for (Column<int32_t>* column : {&slots, &context_lens, &query_lens, &flags, &output_lens, &input_ids, &delta_group, &delta_slot,
                                  &delta_index, &delta_page, &state_kind, &state_group, &state_source, &state_target, &finished_reasons}) {
    column->Clear();
  }
  prefix_intervals.Clear();
  retracted_ids.Clear();
  finished_ids.Clear();
  for (TransferColumns* columns : {&write_back, &load_back, &lookup, &prefetch, &store}) columns->Clear();
}

}  // namespace tokenspeed

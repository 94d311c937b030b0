"""From a plan's arrays to sampled tokens: batch, KV pool, executor, sampler, parallel groups. Knows the model's contract, never the scheduler."""

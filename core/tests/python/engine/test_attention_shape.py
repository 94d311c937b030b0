"""What attention a model's configuration asks for, and how it is dealt out to ranks."""

from __future__ import annotations

from tokenspeed.config import ParallelConfig
from tokenspeed.engine.settings import attention_shape, resolve_parallel

DEEPSEEK = {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def test_a_model_of_latents_has_one_head_of_both_parts() -> None:
    shape = attention_shape(DEEPSEEK)
    assert (shape.kind, shape.kv_heads, shape.head_dim, shape.q_heads) == ("mla", 1, 576, 128)


def test_every_rank_holds_the_latents_and_a_share_of_the_heads() -> None:
    parallel = resolve_parallel(ParallelConfig(tensor_parallel_size=8), attention_shape(DEEPSEEK))
    assert parallel.attn_tp_size == 8

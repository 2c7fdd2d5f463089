"""Configurations of tiny models, of any class of transformers."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "word_embed_proj_dim": 64, "dim": 64, "embed_dim": 64,
    "intermediate_size": 128, "ffn_dim": 128, "n_inner": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "depth": 2,
    "num_attention_heads": 4, "n_head": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 128, "n_positions": 128, "max_source_positions": 64, "max_target_positions": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "moe_k": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_group": 1, "topk_group": 1, "image_size": 28, "patch_size": 14,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


OTHERWISE: dict[str, dict[str, Any]] = {
    "GPTJForCausalLM": {"rotary_dim": 16},
    "Glm4MoeForCausalLM": {"head_dim": 16},
    "Glm4MoeLiteForCausalLM": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "Glm4vForConditionalGeneration": {"vision_config": {"out_hidden_size": 64}},
    "Glm4vMoeForConditionalGeneration": {
        "vision_config": {"out_hidden_size": 64},
        "text_config": {"head_dim": 16, "use_qk_norm": False},
    },
    "GlmOcrForConditionalGeneration": {"vision_config": {"out_hidden_size": 64}},
    "GteModel": {"position_embedding_type": "rope"},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "Lfm2ForCausalLM": {"block_dim": 64},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "XLMRobertaModel": {"position_embedding_type": "absolute"},
}
"""What a class needs besides or instead, by its name."""


def tiny(cls: Any) -> Any:
    """A configuration with which a class of transformers makes a tiny model."""
    return of_configuration(cls.config_class, OTHERWISE.get(cls.__name__, {}))


def of_configuration(config_class: Any, otherwise: dict[str, Any]) -> Any:
    """A configuration of the class, with sizes that are small in all its parts."""
    usual = config_class()
    named = usual.to_dict()
    wanted: dict[str, Any] = {key: value for key, value in SMALL.items() if named.get(key) is not None} | otherwise
    for part in getattr(config_class, "sub_configs", {}):
        sub = getattr(usual, part, None)
        if sub is not None:
            wanted[part] = of_configuration(type(sub), otherwise.get(part, {})).to_dict()
    return config_class(**wanted)

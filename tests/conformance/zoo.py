"""Tiny random models of the architectures that the suite covers, built from configurations; each is a few megabytes.

A model is described by its class, its configuration and what makes a cache's life hard in it. Two layers of width 64
and a vocabulary of 128 run a prompt of 190 tokens in milliseconds. `model(name)` builds one per process.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 100
ENCODER_TOKENS = 150
VISION_PLACES = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}


@dataclass(frozen=True)
class Architecture:
    """One entry of the zoo.

    Args:
        name: Name in the table.
        build: Returns a fresh random model.
        trait: What this architecture adds to what a cache must handle.
        recurrent: Whether some layers keep a recurrent state that no cache can roll back.
        kind: `text`, `vision`, `seq2seq` or `speech`.
        window: Which layers have a window: none, `some` or `all`.
        packs: Whether a quantized strategy packs blocks in at least one layer.
        experts: Whether tokens are routed to experts, where a small error may become a large one.
        restarts: Whether its recurrence starts anew where several tokens follow a cache.
        convolves: Whether neighbours in the sequence mix, whatever the mask.
        counts_columns: Whether a token's position is its column, whatever it is told and whatever padding lies before.
    """

    name: str
    build: Callable[[], PreTrainedModel]
    trait: str
    recurrent: bool = False
    kind: str = "text"
    packs: bool = True
    experts: bool = False
    restarts: bool = False
    convolves: bool = False
    counts_columns: bool = False
    window: str = ""


ZOO: dict[str, Architecture] = {}
# One with full attention only, one with windows and one with other sizes, for strategies that needn't run everywhere.
REPRESENTATIVE = ("Llama", "Gemma 3", "DeepSeek-V3")


def add(name: str, trait: str, config: str, model: str, options: dict | None = None, **facts) -> None:
    """Adds an architecture whose configuration takes the common options, changed by `options`."""
    changed = {**COMMON, **(options or {})}

    def build() -> PreTrainedModel:
        return getattr(transformers, model)(getattr(transformers, config)(**changed))

    ZOO[name] = Architecture(name, build, trait, **facts)


@functools.cache
def model(name: str) -> PreTrainedModel:
    """Returns the model called `name`, the same object on every call in this process."""
    torch.manual_seed(zlib.crc32(name.encode()))
    built = ZOO[name].build().eval()
    listen(built)
    return built


def listen(built: PreTrainedModel, gain: float = 1.3) -> None:
    """Draws weights anew so that the output depends on far tokens.

    As initialized, attention is nearly uniform, and recurrences forget all within a few tokens; steps of e^-4 make
    that tens of tokens.
    """
    embeddings = {id(module.weight) for module in built.modules() if isinstance(module, torch.nn.Embedding)}
    for name, weight in built.named_parameters():
        if id(weight) in embeddings:
            torch.nn.init.normal_(weight, std=0.2)
        elif name.endswith(("k_proj.bias", "query_key_value.bias", "c_attn.bias", "sinks")):
            torch.nn.init.normal_(weight)
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            torch.nn.init.constant_(weight, -4.0)
        elif name.endswith(("conv1d.weight", "conv.weight")):
            torch.nn.init.normal_(weight, std=0.3)
        elif weight.dim() >= 2 and not name.endswith("A_log"):
            transposed = isinstance(built.get_submodule(name.rpartition(".")[0]), Conv1D)
            fan_in = weight.shape[0] if transposed else weight.shape[-1]
            torch.nn.init.normal_(weight, std=gain / fan_in**0.5)


SLIDING_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

add("Llama", "grouped queries", "LlamaConfig", "LlamaForCausalLM")
add("Qwen2", "bias on keys", "Qwen2Config", "Qwen2ForCausalLM")
add("Qwen3", "normalized queries and keys, head_dim apart", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 24})
add(
    "Mistral",
    "every layer sliding",
    "MistralConfig",
    "MistralForCausalLM",
    {"sliding_window": WINDOW},
    window="all",
)
add(
    "Mistral, short window",
    "a window that recent tokens fill",
    "MistralConfig",
    "MistralForCausalLM",
    {"sliding_window": 32},
    window="all",
    packs=False,
)
add(
    "Gemma 2",
    "soft-capped scores, sliding and full",
    "Gemma2Config",
    "Gemma2ForCausalLM",
    {**SLIDING_FULL, "head_dim": 32},
    window="some",
)
add(
    "Gemma 3",
    "sliding and full, two RoPE bases",
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    {**SLIDING_FULL, "head_dim": 32, "num_key_value_heads": 1},
    window="some",
)
add(
    "Gemma 3n",
    "layers that share another layer's cache",
    "Gemma3nTextConfig",
    "Gemma3nForCausalLM",
    {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "head_dim": 16,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    window="some",
)
add(
    "Gemma 4",
    "shared layers, other head size in full layers",
    "Gemma4TextConfig",
    "Gemma4ForCausalLM",
    {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
    },
    window="some",
)
add(
    "gpt-oss",
    "its own learned sinks, sliding and full, experts",
    "GptOssConfig",
    "GptOssForCausalLM",
    {**SLIDING_FULL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    window="some",
    experts=True,
)
add("Phi-3", "partial RoPE", "Phi3Config", "Phi3ForCausalLM", {"partial_rotary_factor": 0.5})
add("GPT-NeoX", "partial RoPE, one key head per query", "GPTNeoXConfig", "GPTNeoXForCausalLM")
add("GPT-2", "no RoPE", "GPT2Config", "GPT2LMHeadModel", {"n_positions": 2048})
add("OPT", "no RoPE, learned positions from the mask", "OPTConfig", "OPTForCausalLM", {"ffn_dim": 96})
add("Falcon", "one KV head", "FalconConfig", "FalconForCausalLM", {"multi_query": True, "alibi": False})
add(
    "DeepSeek-V3",
    "latent attention: keys and values differ in size",
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    experts=True,
)
add(
    "Mixtral",
    "mixture of experts",
    "MixtralConfig",
    "MixtralForCausalLM",
    {"num_local_experts": 4, "num_experts_per_tok": 2},
    experts=True,
)
add(
    "Llama 4",
    "chunked attention and layers without RoPE",
    "Llama4TextConfig",
    "Llama4ForCausalLM",
    {
        "head_dim": 16,
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "moe_layers": [1],
    },
    window="some",
    experts=True,
)
add(
    "Qwen3-Next",
    "linear attention beside full attention",
    "Qwen3NextConfig",
    "Qwen3NextForCausalLM",
    {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    recurrent=True,
    experts=True,
)
add(
    "Jamba",
    "Mamba beside full attention",
    "JambaConfig",
    "JambaForCausalLM",
    {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    recurrent=True,
    experts=True,
    restarts=True,
)
add(
    "Falcon-H1",
    "Mamba and attention in one layer",
    "FalconH1Config",
    "FalconH1ForCausalLM",
    {
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 16,
    },
    recurrent=True,
)
add(
    "LFM2",
    "short convolutions beside full attention",
    "Lfm2Config",
    "Lfm2ForCausalLM",
    {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "block_ff_dim": 96},
    convolves=True,
)
add(
    "T5",
    "encoder-decoder, relative positions",
    "T5Config",
    "T5ForConditionalGeneration",
    {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 1,
    },
    kind="seq2seq",
    counts_columns=True,
)
SEQ2SEQ = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "decoder_start_token_id": 1}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
add(
    "BART",
    "encoder-decoder, learned positions",
    "BartConfig",
    "BartForConditionalGeneration",
    {**SEQ2SEQ, **HEADS, "forced_eos_token_id": None},
    kind="seq2seq",
    counts_columns=True,
)
add(
    "Whisper",
    "speech encoder-decoder",
    "WhisperConfig",
    "WhisperForConditionalGeneration",
    {
        **SEQ2SEQ,
        **HEADS,
        "num_mel_bins": 8,
        "max_source_positions": ENCODER_TOKENS,
        "max_target_positions": 448,
        "begin_suppress_tokens": None,
    },
    kind="speech",
)
add(
    "Qwen2-VL",
    "images, positions in three dimensions",
    "Qwen2VLConfig",
    "Qwen2VLForConditionalGeneration",
    {
        **VISION_PLACES,
        "text_config": {
            **COMMON,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    kind="vision",
)

"""Makes tiny models with random weights for the families that fleets run.

    cd test/srt; python -m models.families FAMILY FOLDER

Names of weights and settings are those of the checkpoints on the hub. The gains are those of
``random_qwen3.py``, for the same reason: the answer depends on every token before it, so that wrong
KV shows. Each model has 4 layers (an MTP head is one more). A model with experts has 8, of which a
token uses two.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from models.random_qwen3 import ATTENTION_GAIN, MLP_GAIN, SHARPNESS, TOKENIZER, TOKENIZER_FILES

HIDDEN, LAYERS, MLP = 128, 4, 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
EXPERTS, EXPERT_MLP = 8, 64
LATENT, NOPE, ROPE = 64, 32, 16
"""Dimensions of MLA: latents of queries and of KV; a head without and with positions."""
MAMBA_HEADS, MAMBA_HEAD_DIM, STATE, KERNEL = 4, 32, 16, 4
VOCABULARY = 688
"""Size of the tokenizer of ``tiny_arith``."""
EOS = 2
PAD = 0
"""Special tokens of the tokenizer."""
Config = dict[str, Any]
Add = Callable[[str, int], None]
"""Adds a part of a layer; gets the part's name and the layer's number."""


class Weights:
    """Tensors of a checkpoint by name."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, name: str, *shape: int, spread: float = 1.0) -> None:
        self.tensors[name] = torch.empty(shape).normal_(0, spread, generator=self._generator)

    def matrix(self, name: str, out: int, inputs: int, gain: float = 1.0) -> None:
        """Add ``name.weight``, which multiplies the spread of its input by ``gain``."""
        self.random(f"{name}.weight", out, inputs, spread=gain * inputs**-0.5)

    def constant(self, name: str, size: int = HIDDEN, value: float = 1.0) -> None:
        """Add ``name.weight``, by default of a norm that changes nothing."""
        self.tensors[f"{name}.weight"] = torch.full((size,), value)

    def layer(self, index: int, attention: Add, mlp: Add, norms: Mapping[str, float]) -> None:
        name = f"model.layers.{index}"
        for norm, value in norms.items():
            self.constant(f"{name}.{norm}", value=value)
        attention(f"{name}.self_attn", index)
        mlp(f"{name}.mlp", index)

    def ends(self, norm: float = 1.0) -> None:
        """Add embedding, last norm and logits; ``EOS`` and ``PAD`` are never the best token."""
        self.random("model.embed_tokens.weight", VOCABULARY, HIDDEN)
        self.matrix("lm_head", VOCABULARY, HIDDEN)
        self.tensors["lm_head.weight"][[PAD, EOS]] = 0
        self.constant("model.norm", value=norm)

    def model(self, attention: Add, mlp: Add, norm: float = 1.0, **norms: float) -> None:
        """Add all layers and the ends. ``norm``: the weight of a norm that changes nothing."""
        usual = {"input_layernorm": norm, "post_attention_layernorm": norm}
        for index in range(LAYERS):
            self.layer(index, attention, mlp, usual | norms)
        self.ends(norm)

    # ---- attention ----

    def heads(
        self, name: str, index: int, norms: str = "", biases: str = "", gate: int = 1
    ) -> None:
        """Add attention by heads.

        Args:
            norms: of queries and of keys: of each ``head``, of ``all`` heads together, or none.
            biases: which of the projections q, k, v and o have one.
            gate: 2 if the query's projection also holds the output gate.
        """
        sharpness = SHARPNESS[index > 0]
        self.matrix(f"{name}.q_proj", QUERIES * gate, HIDDEN, 1.0 if norms == "head" else sharpness)
        self.matrix(f"{name}.k_proj", KEYS, HIDDEN)
        self.matrix(f"{name}.v_proj", KEYS, HIDDEN)
        self.matrix(f"{name}.o_proj", HIDDEN, QUERIES, ATTENTION_GAIN[index > 0])
        if norms:
            self.constant(f"{name}.q_norm", HEAD_DIM if norms == "head" else QUERIES, sharpness)
            self.constant(f"{name}.k_norm", HEAD_DIM if norms == "head" else KEYS)
        for letter in biases:
            size = {"q": QUERIES, "o": HIDDEN}.get(letter, KEYS)
            self.random(f"{name}.{letter}_proj.bias", size, spread=0.1)

    def mla(self, name: str, index: int) -> None:
        """Add latent attention."""
        self.matrix(f"{name}.q_a_proj", LATENT, HIDDEN)
        self.constant(f"{name}.q_a_layernorm", LATENT)
        self.matrix(f"{name}.q_b_proj", HEADS * (NOPE + ROPE), LATENT, SHARPNESS[index > 0])
        self.matrix(f"{name}.kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN)
        self.constant(f"{name}.kv_a_layernorm", LATENT)
        self.matrix(f"{name}.kv_b_proj", HEADS * 2 * NOPE, LATENT)
        self.matrix(f"{name}.o_proj", HIDDEN, HEADS * NOPE, ATTENTION_GAIN[index > 0])

    # ---- MLP ----

    def gated(self, name: str, inner: int, parts: str = "gate_proj up_proj down_proj") -> None:
        """Add a gated MLP; ``parts``: the names of the gate, of the gated matrix and of the last
        matrix."""
        gate, up, down = (f"{name}.{part}" for part in parts.split())
        self.matrix(gate, inner, HIDDEN, MLP_GAIN)
        self.matrix(up, inner, HIDDEN)
        self.matrix(down, HIDDEN, inner, MLP_GAIN)

    def dense(self, name: str, index: int) -> None:
        self.gated(name, MLP)

    def experts(self, name: str, index: int, correction: str = "", shared: str = "") -> None:
        """Add a router with experts.

        Args:
            correction: name of the router's balancing terms, if any.
            shared: name of an expert that all tokens use, if any.
        """
        self.matrix(f"{name}.gate", EXPERTS, HIDDEN)
        if correction:
            self.random(f"{name}.{correction}", EXPERTS, spread=0.01)
        parts = "w1 w3 w2" if "block_sparse" in name else "gate_proj up_proj down_proj"
        for expert in range(EXPERTS):
            self.gated(f"{name}.experts.{expert}", EXPERT_MLP, parts)
        if shared:
            self.gated(f"{name}.{shared}", EXPERT_MLP)

    def later_experts(self, name: str, index: int) -> None:
        """Add a dense MLP to layer 0 and experts to the later layers."""
        if index == 0:
            self.dense(name, index)
        else:
            self.experts(name, index, "gate.e_score_correction_bias", "shared_experts")


def _config(architecture: str, model_type: str, **more: Any) -> Config:
    """Return the settings that the families share, updated with ``more``."""
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
    }
    return config | more


def _sparse(architecture: str, model_type: str, experts: str, **more: Any) -> Config:
    """Return the settings of a model with experts; ``experts``: the name of the setting with their
    number."""
    sparse_settings = {
        experts: EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_MLP,
    }
    return _config(architecture, model_type, norm_topk_prob=True, **sparse_settings, **more)


def llama(weights: Weights) -> Config:
    """Llama 3: dense."""
    weights.model(weights.heads, weights.dense)
    return _config("LlamaForCausalLM", "llama", mlp_bias=False)


def qwen3_moe(weights: Weights) -> Config:
    """Qwen3-MoE."""
    weights.model(partial(weights.heads, norms="head"), weights.experts)
    steps = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return _sparse("Qwen3MoeForCausalLM", "qwen3_moe", "num_experts", **steps)


def glm4_moe(weights: Weights, **more: Any) -> Config:
    """GLM-4.5: biases, a dense layer, an expert that all tokens use."""
    weights.model(partial(weights.heads, norms="head", biases="qkv"), weights.later_experts)
    attention = {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5}
    routing = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    groups = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    more = attention | routing | groups | more
    return _sparse("Glm4MoeForCausalLM", "glm4_moe", "n_routed_experts", **more)


def glm4_moe_nextn(weights: Weights) -> Config:
    """GLM-4.5 with a head that drafts (MTP)."""
    config = glm4_moe(weights, num_nextn_predict_layers=1)
    _head(weights, partial(weights.heads, norms="head", biases="qkv"))
    return config


def _head(weights: Weights, attention: Add) -> None:
    """Add a head that drafts, which is one more layer."""
    norms = ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
    weights.layer(LAYERS, attention, weights.later_experts, dict.fromkeys(norms, 1.0))
    weights.matrix(f"model.layers.{LAYERS}.eh_proj", HIDDEN, 2 * HIDDEN)


def minimax_m2(weights: Weights) -> Config:
    """MiniMax M2: one norm of all heads together, which ranks of tensor parallelism share."""

    def experts(name: str, index: int) -> None:
        name = name.replace("mlp", "block_sparse_moe")
        weights.experts(name, index, "e_score_correction_bias")

    weights.model(partial(weights.heads, norms="all"), experts)
    norms = {"use_qk_norm": True, "qk_norm_type": "per_layer", "rotary_dim": 16}
    norms |= {"partial_rotary_factor": 0.5}  # the same, under the name that transformers reads
    routing = {"scoring_func": "sigmoid", "use_routing_bias": True, "intermediate_size": EXPERT_MLP}
    more = norms | routing | {"attn_type_list": [1] * LAYERS}
    return _sparse("MiniMaxM2ForCausalLM", "minimax_m2", "num_local_experts", **more)


def gemma2(weights: Weights) -> Config:
    """Gemma 2: windows in every other layer, in one pool with the others."""
    norms = {"pre_feedforward_layernorm": 0.0}
    norms |= dict.fromkeys(("post_attention_layernorm", "post_feedforward_layernorm"), 40.0)
    weights.model(weights.heads, weights.dense, norm=0.0, **norms)
    del weights.tensors["lm_head.weight"]
    more = {"sliding_window": 64, "query_pre_attn_scalar": HEAD_DIM, "tie_word_embeddings": True}
    more |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": None}
    more |= dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
    return _config("Gemma2ForCausalLM", "gemma2", **more)


def gpt_oss(weights: Weights) -> Config:
    """gpt-oss: windows in a separate pool, attention sinks, experts with biases."""

    def attention(name: str, index: int) -> None:
        weights.heads(name, index, biases="qkvo")
        weights.random(f"{name}.sinks", HEADS)

    def experts(name: str, index: int) -> None:
        weights.matrix(f"{name}.router", EXPERTS, HIDDEN)
        weights.random(f"{name}.router.bias", EXPERTS, spread=0.1)
        shapes = {"gate_up_proj": (HIDDEN, 2 * EXPERT_MLP), "down_proj": (EXPERT_MLP, HIDDEN)}
        for part, (inputs, out) in shapes.items():
            projection, spread = f"{name}.experts.{part}", MLP_GAIN * inputs**-0.5
            weights.random(projection, EXPERTS, inputs, out, spread=spread)
            weights.random(f"{projection}_bias", EXPERTS, out, spread=0.1)

    weights.model(attention, experts)
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    sizes = {"intermediate_size": EXPERT_MLP, "attention_bias": True, "swiglu_limit": 7.0}
    return _sparse("GptOssForCausalLM", "gpt_oss", "num_local_experts", **windows, **sizes)


def deepseek_v3(weights: Weights, **more: Any) -> Config:
    """DeepSeek V3 and Kimi K2: MLA, experts in groups."""
    weights.model(weights.mla, weights.later_experts)
    latents = {"q_lora_rank": LATENT, "kv_lora_rank": LATENT, "num_key_value_heads": HEADS}
    latents |= {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": NOPE}
    routing = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    routing |= {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "moe_layer_freq": 1}
    routing |= {"scoring_func": "sigmoid"}
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    more = {"num_nextn_predict_layers": 0, "rope_scaling": rope} | latents | routing | more
    config = _sparse("DeepseekV3ForCausalLM", "deepseek_v3", "n_routed_experts", **more)
    del config["head_dim"]
    return config


def deepseek_v3_nextn(weights: Weights) -> Config:
    """DeepSeek V3 with a head that drafts (MTP)."""
    config = deepseek_v3(weights, num_nextn_predict_layers=1)
    _head(weights, weights.mla)
    return config


def deepseek_v32(weights: Weights) -> Config:
    """DeepSeek V3.2 and GLM-5: attention to the 64 tokens that an index chooses (DSA)."""
    heads, dim = 24, 128
    config = deepseek_v3(weights, index_n_heads=heads, index_head_dim=dim, index_topk=64)
    for index in range(LAYERS):
        indexer = f"model.layers.{index}.self_attn.indexer"
        weights.matrix(f"{indexer}.wq_b", heads * dim, LATENT)
        weights.matrix(f"{indexer}.wk", dim, HIDDEN)
        weights.matrix(f"{indexer}.weights_proj", heads, HIDDEN)
        weights.constant(f"{indexer}.k_norm", dim)
        weights.tensors[f"{indexer}.k_norm.bias"] = torch.zeros(dim)
    return config


def qwen3_next(weights: Weights) -> Config:
    """Qwen3-Next: every other layer is a gated delta net, with a state of fixed size."""
    value_heads, key_heads, dim, width = 6, 2, 32, 4
    keys, values = key_heads * dim, value_heads * dim

    def attention(name: str, index: int) -> None:
        if index % 2:
            weights.heads(name, index, norms="head", gate=2)
            weights.constant(f"{name}.q_norm", HEAD_DIM, SHARPNESS[1] - 1)
            weights.constant(f"{name}.k_norm", HEAD_DIM, 0.0)
            return
        net = name.replace("self_attn", "linear_attn")
        weights.matrix(f"{net}.in_proj_qkvz", 2 * keys + 2 * values, HIDDEN)
        weights.matrix(f"{net}.in_proj_ba", 2 * value_heads, HIDDEN)
        weights.random(f"{net}.conv1d.weight", 2 * keys + values, 1, width, spread=0.5)
        # Slow decay, so that an early token is still in the state at the end.
        weights.tensors[f"{net}.A_log"] = torch.linspace(0.005, 0.05, value_heads).log()
        weights.tensors[f"{net}.dt_bias"] = torch.ones(value_heads)
        weights.constant(f"{net}.norm", dim)
        weights.matrix(f"{net}.out_proj", HIDDEN, values, ATTENTION_GAIN[1])

    def experts(name: str, index: int) -> None:
        weights.experts(name, index, shared="shared_expert")
        weights.matrix(f"{name}.shared_expert_gate", 1, HIDDEN)

    weights.model(attention, experts, norm=0.0)
    net = {"linear_num_value_heads": value_heads, "linear_num_key_heads": key_heads}
    net |= {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    net |= {"linear_conv_kernel_dim": width, "full_attention_interval": 2}
    more = {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": []}
    more |= {"shared_expert_intermediate_size": EXPERT_MLP, "decoder_sparse_step": 1}
    more |= {"partial_rotary_factor": 0.25}
    return _sparse("Qwen3NextForCausalLM", "qwen3_next", "num_experts", **net, **more)


def _mamba2(weights: Weights, name: str) -> None:
    """Add Mamba2."""
    inner = MAMBA_HEADS * MAMBA_HEAD_DIM
    weights.matrix(f"{name}.in_proj", 2 * inner + 2 * STATE + MAMBA_HEADS, HIDDEN)
    weights.random(f"{name}.conv1d.weight", inner + 2 * STATE, 1, KERNEL, spread=0.5)
    weights.random(f"{name}.conv1d.bias", inner + 2 * STATE, spread=0.1)
    # Slow decay, as above.
    weights.tensors[f"{name}.A_log"] = torch.linspace(0.005, 0.05, MAMBA_HEADS).log()
    for part in ("dt_bias", "D"):
        weights.tensors[f"{name}.{part}"] = torch.ones(MAMBA_HEADS)
    weights.constant(f"{name}.norm", inner)
    weights.matrix(f"{name}.out_proj", HIDDEN, inner, ATTENTION_GAIN[1])


def falcon_h1(weights: Weights) -> Config:
    """Falcon-H1: attention and Mamba2 side by side in each layer."""

    def attention(name: str, index: int) -> None:
        weights.heads(name, index)
        _mamba2(weights, name.replace("self_attn", "mamba"))

    def mlp(name: str, index: int) -> None:
        weights.dense(name.replace("mlp", "feed_forward"), index)
        layer = name.removesuffix(".mlp")
        weights.tensors[f"{layer}.pre_ff_layernorm.weight"] = weights.tensors.pop(
            f"{layer}.post_attention_layernorm.weight"
        )

    weights.model(attention, mlp)
    weights.tensors["model.final_layernorm.weight"] = weights.tensors.pop("model.norm.weight")
    mamba = {"d_ssm": MAMBA_HEADS * MAMBA_HEAD_DIM, "n_heads": MAMBA_HEADS, "n_groups": 1}
    mamba |= {"d_head": MAMBA_HEAD_DIM, "d_state": STATE, "d_conv": KERNEL}
    mamba |= {"chunk_size": 64, "conv_bias": True, "proj_bias": False}
    mamba |= {"rms_norm": True, "norm_before_gate": False}
    mamba_settings = {f"mamba_{name}": value for name, value in mamba.items()}
    return _config("FalconH1ForCausalLM", "falcon_h1", **mamba_settings)


def nemotron_h(weights: Weights) -> Config:
    """Nemotron-H: layers of Mamba2 (M) and of attention (*), each without an MLP."""
    pattern = "M*M*"
    for index, kind in enumerate(pattern):
        layer = f"backbone.layers.{index}"
        weights.constant(f"{layer}.norm")
        if kind == "M":
            _mamba2(weights, f"{layer}.mixer")
        else:
            weights.heads(f"{layer}.mixer", index)
    weights.ends()
    for name, hub_name in (("embed_tokens", "embeddings"), ("norm", "norm_f")):
        weights.tensors[f"backbone.{hub_name}.weight"] = weights.tensors.pop(f"model.{name}.weight")
    mamba = {"mamba_num_heads": MAMBA_HEADS, "mamba_head_dim": MAMBA_HEAD_DIM}
    mamba |= {"ssm_state_size": STATE, "conv_kernel": KERNEL, "n_groups": 1}
    mamba |= {"mamba_n_groups": 1, "mamba_chunk_size": 64}
    more = {"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-6} | mamba
    return _config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern=pattern, **more)


FAMILIES = {
    make.__name__: make
    for make in (
        *(llama, qwen3_moe, glm4_moe, glm4_moe_nextn, minimax_m2, gemma2, gpt_oss),
        *(deepseek_v3, deepseek_v3_nextn, deepseek_v32),
        *(qwen3_next, falcon_h1, nemotron_h),
    )
}


def build(folder: str | Path, family: str, seed: int = 0) -> Path:
    """Write a model of ``family`` in float32. Return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = Weights(seed)
    config = FAMILIES[family](weights)
    generation = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    save_file(weights.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", type=Path)
    print(build(**vars(parser.parse_args())))

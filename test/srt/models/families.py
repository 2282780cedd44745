"""Tiny random models of several families, checkpoint names as on the hub; see random_qwen3.py for the gains."""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

TOK = Path(__file__).parent / "tiny_arith"
V, H, L = 688, 128, 4
SHARP = (0.7, 10.0)
ATT = (16.0, 6.0)
MLP = 3.0


class W:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.d = {}

    def mat(self, name, out, inp, gain=1.0, *lead):
        self.d[name] = torch.empty(*lead, out, inp).normal_(0, gain * inp**-0.5, generator=self.g)

    def ones(self, name, n, v=1.0):
        self.d[name] = torch.full((n,), v)

    def vec(self, name, n, s):
        self.d[name] = torch.empty(n).normal_(0, s, generator=self.g)

    def ends(self, norm=1.0):
        self.d["model.embed_tokens.weight"] = torch.empty(V, H).normal_(0, 1, generator=self.g)
        self.mat("lm_head.weight", V, H)
        self.d["lm_head.weight"][[0, 2]] = 0
        self.ones("model.norm.weight", H, norm)


def common(arch, mt, **more):
    return {
        "architectures": [arch],
        "model_type": mt,
        "vocab_size": V,
        "hidden_size": H,
        "num_hidden_layers": L,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "attention_dropout": 0.0,
        **more,
    }


def mlp(w, p, inter, gain=MLP):
    w.mat(p + "gate_proj.weight", inter, H, gain)
    w.mat(p + "up_proj.weight", inter, H)
    w.mat(p + "down_proj.weight", H, inter, gain)


def gqa(w, p, i, nh=4, nkv=2, hd=32, norms="head", bias=False, qmul=1):
    s, a = SHARP[i > 0], ATT[i > 0]
    w.mat(p + "q_proj.weight", nh * hd * qmul, H, 1.0 if norms == "head" else s)
    w.mat(p + "k_proj.weight", nkv * hd, H)
    w.mat(p + "v_proj.weight", nkv * hd, H)
    w.mat(p + "o_proj.weight", H, nh * hd, a)
    if norms == "head":
        w.ones(p + "q_norm.weight", hd, s)
        w.ones(p + "k_norm.weight", hd)
    if norms == "all":
        w.ones(p + "q_norm.weight", nh * hd, s)
        w.ones(p + "k_norm.weight", nkv * hd)


def lnorms(w, p, names=("input_layernorm", "post_attention_layernorm"), v=1.0):
    for n in names:
        w.ones(p + n + ".weight", H, v)


# ---- families ----
def qwen3_moe_sharp(w):
    return qwen3_moe(w, 6.0)


def qwen3_moe(w, router=1.0):
    E, I = 8, 64
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p)
        gqa(w, p + "self_attn.", i)
        w.mat(p + "mlp.gate.weight", E, H, router)
        for e in range(E):
            mlp(w, f"{p}mlp.experts.{e}.", I)
    w.ends()
    return common(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        intermediate_size=256,
        moe_intermediate_size=I,
        num_experts=E,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        router_aux_loss_coef=0.001,
        output_router_logits=False,
        use_sliding_window=False,
        sliding_window=None,
    )


def llama(w):
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p)
        gqa(w, p + "self_attn.", i, norms="none")
        mlp(w, p + "mlp.", 256)
    w.ends()
    return common(
        "LlamaForCausalLM",
        "llama",
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mlp_bias=False,
    )


def glm4_moe(w):
    E, I = 8, 64
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p)
        gqa(w, p + "self_attn.", i)
        for n, k in (("q", 128), ("k", 64), ("v", 64)):
            w.vec(f"{p}self_attn.{n}_proj.bias", k, 0.1)
        if i == 0:
            mlp(w, p + "mlp.", 256)
            continue
        w.mat(p + "mlp.gate.weight", E, H)
        w.vec(p + "mlp.gate.e_score_correction_bias", E, 0.01)
        for e in range(E):
            mlp(w, f"{p}mlp.experts.{e}.", I)
        mlp(w, p + "mlp.shared_experts.", I)
    w.ends()
    return common(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        intermediate_size=256,
        moe_intermediate_size=I,
        n_routed_experts=E,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        partial_rotary_factor=0.5,
        use_qk_norm=True,
        attention_bias=True,
        num_nextn_predict_layers=0,
        rope_scaling=None,
    )


def minimax_m2(w):
    E, I = 8, 64
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p)
        gqa(w, p + "self_attn.", i, norms="all")
        q = p + "block_sparse_moe."
        w.mat(q + "gate.weight", E, H)
        w.vec(q + "e_score_correction_bias", E, 0.01)
        for e in range(E):
            w.mat(f"{q}experts.{e}.w1.weight", I, H, MLP)
            w.mat(f"{q}experts.{e}.w3.weight", I, H)
            w.mat(f"{q}experts.{e}.w2.weight", H, I, MLP)
    w.ends()
    return common(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        intermediate_size=I,
        num_local_experts=E,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rotary_dim=16,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_routing_bias=True,
        attn_type_list=[1] * L,
        num_mtp_modules=0,
        use_mtp=False,
        shared_intermediate_size=0,
    )


QL, KL, NOPE, ROPE, VD, NH = 64, 64, 32, 16, 32, 4


def mla(w, p, i, q_lora=True):
    s, a = SHARP[i > 0], ATT[i > 0]
    if q_lora:
        w.mat(p + "q_a_proj.weight", QL, H)
        w.ones(p + "q_a_layernorm.weight", QL)
        w.mat(p + "q_b_proj.weight", NH * (NOPE + ROPE), QL, s)
    else:
        w.mat(p + "q_proj.weight", NH * (NOPE + ROPE), H, s)
    w.mat(p + "kv_a_proj_with_mqa.weight", KL + ROPE, H)
    w.ones(p + "kv_a_layernorm.weight", KL)
    w.mat(p + "kv_b_proj.weight", NH * (NOPE + VD), KL)
    w.mat(p + "o_proj.weight", H, NH * VD, a)


def ds_moe(w, p, i, E=8, I=64):
    if i == 0:
        mlp(w, p + "mlp.", 256)
        return
    w.mat(p + "mlp.gate.weight", E, H)
    w.vec(p + "mlp.gate.e_score_correction_bias", E, 0.01)
    for e in range(E):
        mlp(w, f"{p}mlp.experts.{e}.", I)
    mlp(w, p + "mlp.shared_experts.", I)


def deepseek_v3(w, arch="DeepseekV3ForCausalLM", nextn=0, mt="deepseek_v3", **more):
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p)
        mla(w, p + "self_attn.", i)
        ds_moe(w, p, i)
    if nextn:
        p = f"model.layers.{L}."
        lnorms(w, p)
        mla(w, p + "self_attn.", 1)
        ds_moe(w, p, 1)
        w.mat(p + "eh_proj.weight", H, 2 * H)
        for n in ("enorm", "hnorm", "shared_head.norm"):
            w.ones(p + n + ".weight", H)
    w.ends()
    return common(
        arch,
        mt,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        num_attention_heads=NH,
        num_key_value_heads=NH,
        q_lora_rank=QL,
        kv_lora_rank=KL,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VD,
        num_nextn_predict_layers=nextn,
        ep_size=1,
        seq_aux=True,
        pretraining_tp=1,
        aux_loss_alpha=0.001,
        **{
            "rope_scaling": dict(
                type="yarn",
                rope_type="yarn",
                factor=8.0,
                original_max_position_embeddings=4096,
                beta_fast=32,
                beta_slow=1,
                mscale=1.0,
                mscale_all_dim=1.0,
                rope_theta=10000.0,
            ),
            **more,
        },
    )


def deepseek_v32(w):
    c = deepseek_v3(w, index_n_heads=24, index_head_dim=128, index_topk=64)
    for i in range(L):
        p = f"model.layers.{i}.self_attn.indexer."
        w.mat(p + "wq_b.weight", 24 * 128, QL)
        w.mat(p + "wk.weight", 128, H)
        w.mat(p + "weights_proj.weight", 24, H)
        w.ones(p + "k_norm.weight", 128)
        w.ones(p + "k_norm.bias", 128, 0.0)
    return c


def deepseek_v3_nextn(w):
    return deepseek_v3(w, nextn=1)


def gpt_oss(w):
    E, I = 8, 64
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p)
        gqa(w, p + "self_attn.", i, norms="none")
        for n, k in (("q", 128), ("k", 64), ("v", 64), ("o", H)):
            w.vec(f"{p}self_attn.{n}_proj.bias", k, 0.1)
        w.vec(p + "self_attn.sinks", 4, 1.0)
        w.mat(p + "mlp.router.weight", E, H)
        w.vec(p + "mlp.router.bias", E, 0.1)
        q = p + "mlp.experts."
        w.d[q + "gate_up_proj"] = torch.empty(E, H, 2 * I).normal_(0, MLP * H**-0.5, generator=w.g)
        w.d[q + "gate_up_proj_bias"] = torch.empty(E, 2 * I).normal_(0, 0.1, generator=w.g)
        w.d[q + "down_proj"] = torch.empty(E, I, H).normal_(0, MLP * I**-0.5, generator=w.g)
        w.d[q + "down_proj_bias"] = torch.empty(E, H).normal_(0, 0.1, generator=w.g)
    w.ends()
    return common(
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=I,
        num_local_experts=E,
        num_experts_per_tok=2,
        experts_per_token=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        swiglu_limit=7.0,
        attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * (L // 2),
        rope_scaling=None,
        router_aux_loss_coef=0.9,
        output_router_logits=False,
    )


def gemma2(w):
    # Gemma norms multiply by 1 + w
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p, ("input_layernorm", "pre_feedforward_layernorm"), 0.0)
        w.ones(p + "post_attention_layernorm.weight", H, 40.0)
        w.ones(p + "post_feedforward_layernorm.weight", H, 40.0)
        gqa(w, p + "self_attn.", i, norms="none")
        mlp(w, p + "mlp.", 256)
    w.ends(0.0)
    del w.d["lm_head.weight"]
    c = common(
        "Gemma2ForCausalLM",
        "gemma2",
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh",
    )
    c["tie_word_embeddings"] = True
    c["hidden_act"] = "gelu_pytorch_tanh"
    return c


def qwen3_next(w, full=(1, 3)):
    E, I, NV, NK, DK, DV = 8, 64, 6, 2, 32, 32
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p, v=0.0)
        if i in full:
            q = p + "self_attn."
            gqa(w, q, i, qmul=2)
            w.ones(q + "q_norm.weight", 32, SHARP[1] - 1)
            w.ones(q + "k_norm.weight", 32, 0.0)
        else:
            q = p + "linear_attn."
            w.mat(q + "in_proj_qkvz.weight", 2 * NK * DK + 2 * NV * DV, H)
            w.mat(q + "in_proj_ba.weight", 2 * NV, H)
            w.d[q + "conv1d.weight"] = torch.empty(2 * NK * DK + NV * DV, 1, 4).normal_(
                0, 0.5, generator=w.g
            )
            w.d[q + "A_log"] = torch.log(torch.linspace(0.005, 0.05, NV))
            w.ones(q + "dt_bias", NV, 1.0)
            w.ones(q + "norm.weight", DV)
            w.mat(q + "out_proj.weight", H, NV * DV, 6.0)
        w.mat(p + "mlp.gate.weight", E, H)
        for e in range(E):
            mlp(w, f"{p}mlp.experts.{e}.", I)
        mlp(w, p + "mlp.shared_expert.", I)
        w.mat(p + "mlp.shared_expert_gate.weight", 1, H)
    w.ends(0.0)
    return common(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        intermediate_size=256,
        moe_intermediate_size=I,
        shared_expert_intermediate_size=I,
        num_experts=E,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        partial_rotary_factor=0.25,
        linear_num_value_heads=NV,
        linear_num_key_heads=NK,
        linear_key_head_dim=DK,
        linear_value_head_dim=DV,
        linear_conv_kernel_dim=4,
        full_attention_interval=2,
        layer_types=["full_attention" if i in full else "linear_attention" for i in range(L)],
        rope_scaling=None,
    )


def mamba2(w, m, heads, width, state):
    inner = heads * width
    w.mat(m + "in_proj.weight", 2 * inner + 2 * state + heads, H)
    w.mat(m + "conv1d.weight", 1, 4, 1.0, inner + 2 * state)
    w.vec(m + "conv1d.bias", inner + 2 * state, 0.1)
    w.d[m + "A_log"] = torch.log(torch.linspace(0.005, 0.05, heads))
    for name in ("dt_bias", "D"):
        w.ones(m + name, heads)
    w.ones(m + "norm.weight", inner)
    w.mat(m + "out_proj.weight", H, inner, 6.0)


def falcon_h1(w, heads=4, width=32, state=16):
    """Attention and Mamba2 side by side in each layer."""
    for i in range(L):
        p = f"model.layers.{i}."
        lnorms(w, p, ("input_layernorm", "pre_ff_layernorm"))
        gqa(w, p + "self_attn.", i, norms="")
        mamba2(w, p + "mamba.", heads, width, state)
        mlp(w, p + "feed_forward.", 256)
    w.ends()
    w.d["model.final_layernorm.weight"] = w.d.pop("model.norm.weight")
    return common(
        "FalconH1ForCausalLM",
        "falcon_h1",
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mamba_d_ssm=heads * width,
        mamba_n_heads=heads,
        mamba_d_head=width,
        mamba_n_groups=1,
        mamba_d_state=state,
        mamba_d_conv=4,
        mamba_chunk_size=64,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    )


def nemotron_h(w, pattern="M-*-M-*-", heads=4, width=32, state=16):
    """Layers of Mamba2 (M), attention (*) or an MLP (-)."""
    for i, kind in enumerate(pattern):
        p = f"backbone.layers.{i}."
        lnorms(w, p, ("norm",))
        if kind == "M":
            mamba2(w, p + "mixer.", heads, width, state)
        elif kind == "*":
            gqa(w, p + "mixer.", i, norms="")
        else:
            w.mat(p + "mixer.up_proj.weight", 256, H, MLP)
            w.mat(p + "mixer.down_proj.weight", H, 256)
    w.ends()
    w.d["backbone.embeddings.weight"] = w.d.pop("model.embed_tokens.weight")
    w.d["backbone.norm_f.weight"] = w.d.pop("model.norm.weight")
    return common(
        "NemotronHForCausalLM",
        "nemotron_h",
        intermediate_size=256,
        num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mlp_hidden_act="relu2",
        layer_norm_epsilon=1e-6,
        ssm_state_size=state,
        mamba_num_heads=heads,
        mamba_head_dim=width,
        n_groups=1,
        mamba_n_groups=1,
        conv_kernel=4,
        mamba_chunk_size=64,
    )


def build(folder, family, seed=0):
    """Writes a random model of ``family`` with tiny_arith's tokenizer. Returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    w = W(seed)
    config = globals()[family](w)
    save_file(
        {k: v.contiguous() for k, v in w.d.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": 2, "pad_token_id": 0})
    )
    for n in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOK / n, folder / n)
    return folder


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(build(Path("out/models") / each, each))

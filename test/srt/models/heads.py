"""Writes draft heads with random weights: an EAGLE3 head for a model, and a model with an MTP head.

Nearly all drafts are rejected. The heads serve to run a head's code path: its one layer has fewer
KV buffers than the target, and it starts from hidden states of several of the target's layers
(EAGLE3) or of the last one (MTP).
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from models.random_qwen3 import TOKENIZER, TOKENIZER_FILES, fill


def eagle3(folder: str | Path, target: str | Path, seed: int = 0) -> Path:
    """Write an EAGLE3 head for the model in ``target``, in float32. Return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target_config = json.loads((Path(target) / "config.json").read_text())
    copied_settings = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
        *("eos_token_id", "pad_token_id"),
    )
    config = {name: target_config[name] for name in copied_settings} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target_config["vocab_size"],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        },
    }
    hidden, mlp, head = (
        target_config["hidden_size"],
        target_config["intermediate_size"],
        target_config["head_dim"],
    )
    queries, keys = (
        target_config["num_attention_heads"] * head,
        target_config["num_key_value_heads"] * head,
    )
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        **{f"midlayer.mlp.{name}_proj": (mlp, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (hidden, mlp),
        "lm_head": (target_config["vocab_size"], hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = _draw(shapes, seed) | {
        f"{name}.weight": torch.ones(hidden)
        for name in ("norm", *(f"midlayer.{norm}" for norm in norms))
    }
    return _write(folder, config, weights)


def mtp(folder: str | Path, seed: int = 0, hidden: int = 128) -> Path:
    """Write a model of the MiMo kind with its MTP head, in float32. Return the folder.

    MiMo is a Qwen2 with a head that reads the last hidden state beside the next token.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base = Qwen3Config.from_pretrained(TOKENIZER)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=base.vocab_size,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=base.max_position_embeddings,
            rope_parameters=base.rope_parameters,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=base.eos_token_id,
            pad_token_id=base.pad_token_id,
        )
    )
    fill(model, seed, never=[base.eos_token_id, base.pad_token_id])
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    # The head's layer is a copy of one of the model's.
    for name, weight in list(weights.items()):
        if name.startswith("model.layers.2."):
            weights[name.replace("layers.2", "mtp_layers.0")] = weight.clone()
    head_name = "model.mtp_layers.0"
    weights |= _draw({f"{head_name}.input_proj": (hidden, 2 * hidden)}, seed)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{head_name}.{norm}.weight"] = torch.ones(hidden)
    config = model.config.to_dict() | {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
        "head_dim": hidden // 4,
        "dtype": "float32",
    }
    return _write(folder, config, weights)


def _draw(shapes: dict[str, tuple[int, int]], seed: int) -> dict[str, torch.Tensor]:
    """Return matrices of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }


def _write(folder: Path, config: dict[str, object], weights: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    return folder

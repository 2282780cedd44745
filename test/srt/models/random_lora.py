"""Makes a LoRA adapter with random weights for a model of ``random_qwen3``, in PEFT's format.

The adapter changes queries, keys, values and outputs of every layer's attention about as much as
the weights themselves do: greedy output differs soon between two adapters, with and without one,
and if one reads the other's KV.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def build(folder: str | Path, model: str | Path, seed: int, rank: int = 4) -> Path:
    """Write the adapter in float32; return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    shapes = {  # inputs and outputs
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }
    rng = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return rng.normal(0.0, inputs**-0.5, (outputs, inputs)).astype(np.float32)

    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = matrix(rank, inputs)
            weights[f"{prefix}.lora_B.weight"] = matrix(outputs, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [*shapes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return folder

"""Makes a Qwen3 model with random weights; its greedy output depends on every token of the context.

    python test/srt/models/random_qwen3.py FOLDER [--seed N] [--layers N] ...

The output tells right KV from wrong KV where a trained model's would not: with one cached token
missing, doubled or replaced, it soon differs. The reasons:

- The first layer's attention is flat, so every token contributes to each position; sharp attention
  would give all the weight to a few. It is scaled up, since a mean over many tokens is small.
- The later layers' attention is sharp: it magnifies small differences, which decide the winning
  positions. Flat attention would give all positions the same mean, the last token would no longer
  matter, and the output would be one token repeated.
- Logits have a separate matrix, as a tied one would favour repeating the last token.

The distance between the two best logits is nearly always far above the rounding noise of float32
(about 1e-5 of a logit's spread), though not above that of half precision: serve the model with
``--dtype float32``. The model never ends its turn. The tokens spell no valid text: compare ids.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

TOKENIZER = Path(__file__).parent / "tiny_arith"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STAMP = "random_qwen3.json"
"""Written last: the parameters of a finished build."""
VERSION = 1
"""Raise it if the weights of a given seed change."""
SHARPNESS = (0.7, 10.0)
"""Spread of the attention scores, in the first layer and in later ones."""
ATTENTION_GAIN = (16.0, 6.0)
"""Gain of the projection after attention, in the first layer and in later ones."""
MLP_GAIN = 3.0
"""Gain of each projection of an MLP except `up_proj`."""


def build(
    folder: str | Path,
    seed: int = 0,
    *,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 192,
    intermediate: int = 512,
) -> Path:
    """Write the model in float32 with tiny_arith's tokenizer, unless the folder already has it.

    KV takes ``layers * 2 * kv_heads * head_dim * 4`` bytes per token in float32. Return the folder.
    """
    folder = Path(folder)
    base = Qwen3Config.from_pretrained(TOKENIZER)
    shape = {
        "vocab_size": base.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    wanted = json.dumps({"version": VERSION, "seed": seed, **shape})
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    ends = {"eos_token_id": base.eos_token_id, "pad_token_id": base.pad_token_id}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            max_position_embeddings=base.max_position_embeddings,
            rope_parameters=base.rope_parameters,
            tie_word_embeddings=False,
            bos_token_id=None,
            **ends,
            **shape,
        )
    )
    fill(model, seed, never=list(ends.values()))
    model.generation_config = GenerationConfig(do_sample=False, **ends)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    stamp.write_text(wanted)
    return folder


def fill(model: Qwen3ForCausalLM, seed: int, never: list[int]) -> None:
    """Draw every matrix with unit gain times the gain of its kind.

    The tokens of `never` get a logit of zero, which among hundreds of unit variance is never best.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        weight = parameter.data
        later = ".layers." in name and ".layers.0." not in name
        if "q_norm" in name:
            weight.fill_(SHARPNESS[later])
        if weight.dim() < 2:
            continue
        spread = weight.shape[1] ** -0.5
        if "embed_tokens" in name:
            spread = 1.0
        elif "o_proj" in name:
            spread *= ATTENTION_GAIN[later]
        elif "gate_proj" in name or "down_proj" in name:
            spread *= MLP_GAIN
        weight.normal_(0.0, spread, generator=generator)
    model.lm_head.weight.data[never] = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int, default=512)
    print(build(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()

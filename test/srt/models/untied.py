"""Writes a copy of ``tiny_arith`` with a separate matrix for the logits: a draft for itself.

SGLang's EAGLE worker runs any causal model as the draft. A plain one sees the tokens shifted by one
and ignores the target's hidden states, so it depends on its own KV more than a trained head does.
As its own draft ``tiny_arith`` guesses nearly every first token right, and far fewer if its KV is
not that of the text. The worker replaces the draft's matrices by the target's, which is impossible
if embedding and logits share a matrix.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

SOURCE = Path(__file__).parent / "tiny_arith"


def build(folder: str | Path) -> Path:
    """Write the copy in float32. Return the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in SOURCE.iterdir():
        if file.name not in ("config.json", "model.safetensors", "test_set.jsonl"):
            shutil.copyfile(file, folder / file.name)
    config = json.loads((SOURCE / "config.json").read_text())
    config |= {"tie_word_embeddings": False, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: w.float() for name, w in load_file(SOURCE / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

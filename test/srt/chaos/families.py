"""The families of models that the pair of an arm can serve, and the arguments of its servers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.harness.fleet import PairConfig
from benchmark.harness.models import random_qwen3
from e2e.support import dp_attention

WEIGHTS = "model.safetensors"
ROUNDING = 1e-6
"""Relative change of a weight. A float32 rounds by 6e-8, and a sum rounds often."""


@dataclass(frozen=True)
class Served:
    """Servers of a family."""

    page_size: int
    arguments: tuple[str, ...] = ()
    """Arguments of all servers, including the aggregated one."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of all servers, including the aggregated one."""
    has_decode_dp: bool = False
    """True if decode has two ranks of attention data parallelism."""
    roundings: int = 0
    """Number of rounded models that must agree on a token for it to be expected."""


DENSE = Served(1)
"""``models.random_qwen3``, of any page size."""
FAMILIES = {
    "deepseek_v3": Served(16, has_decode_dp=True),
    # The last bit decides which tokens its index, in fp8, chooses.
    "deepseek_v32": Served(64, roundings=3),
    # Fewer states than requests at once; SGLang's default takes gigabytes.
    "qwen3_next": Served(
        1,
        ("--max-mamba-cache-size", "12"),
        # The default, bfloat16, rounds at the end of each chunk, which changes answers.
        (("SGLANG_MAMBA_CONV_DTYPE", "float32"),),
    ),
}
"""Name in ``models.families`` -> its servers."""


def make_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Make a model of a family, or a dense one if ``family`` is empty. Return its folder."""
    if not family:
        return random_qwen3(folder, seed)
    from models.families import build  # imports torch, which the rest of this module avoids

    return build(folder, family, seed)


def rounded(model: Path, folder: Path, trial: int) -> Path:
    """Write ``model`` with weights that differ by some float32 roundings. Return its folder."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(trial)
    weights = {
        name: weight * (1 + ROUNDING * torch.randn(weight.shape, generator=generator))
        for name, weight in load_file(model / WEIGHTS).items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def serve(config: PairConfig, family: str) -> PairConfig:
    """Return ``config`` with the arguments that the family's servers need."""
    served = FAMILIES.get(family, DENSE)
    decode_args = dp_attention() if served.has_decode_dp else ()
    return replace(
        config,
        decode_tp=2 if served.has_decode_dp else 1,
        prefill_args=(*config.prefill_args, *served.arguments),
        decode_args=(*config.decode_args, *served.arguments, *decode_args),
        env={**config.env, **dict(served.env)},
    )

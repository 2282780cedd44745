"""Environment of a process of SGLang 0.5.23 that runs a real model without a GPU."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

RELEASE = "0.5.23"
#: SGLang's file for ``models.random_qwen3``; without a limit it imports 200 others at its start.
MODEL = "qwen3"
#: Placeholder for the model's folder, which is known when a test runs.
OWN_DRAFT = "the model"
#: SGLang's files for the families of ``models.families`` in scenes.
FAMILIES = ("gpt_oss", "deepseek_v2", "falcon_h1")
#: SGLang refuses the name ``torch_native``; the stand-in replaces Triton by it. The other runner of
#: experts lays its weights out differently.
GPT_OSS = ("--attention-backend", "triton", "--moe-runner-backend", "triton")
#: For states of a fixed size. Without the last argument they take gigabytes.
FALCON_H1 = (
    *("--page-size", "1", "--mamba-radix-cache-strategy", "no_buffer"),
    *("--disable-overlap-schedule", "--max-mamba-cache-size", "60"),
)
#: Arguments for EAGLE with chains of three drafts.
DRAFTS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", OWN_DRAFT),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)


def environment(package: Path | None = None, models: Collection[str] = (MODEL,)) -> dict[str, str]:
    """Return variables to set before SGLang is imported: one thread, no network, few models, no
    waiting for GPU events.

    Args:
        package: SGLang's folder; None for the one of this environment.
        models: the only files of SGLang's models that are imported.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "UCX_TLS": "tcp,self",
        "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(package, models)),
    }


def _other_models(package: Path | None, models: Collection[str]) -> list[str]:
    # List the folder, because the variables must be set before SGLang is imported.
    spec = None if package else find_spec("sglang")
    folders = [package] if package else spec and spec.submodule_search_locations
    paths = [path for folder in folders or () for path in Path(folder, "srt/models").glob("*.py")]
    return sorted(path.stem for path in paths if path.stem not in (*models, "__init__"))

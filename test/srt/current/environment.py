"""Environment of a process of SGLang 0.5.23 that runs a real model without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

RELEASE = "0.5.23"
#: SGLang's file for ``models.random_qwen3``; without a limit it imports 200 others at its start.
MODEL = "qwen3"
#: Placeholder for the model's folder, which is known when a test runs.
OWN_DRAFT = "the model"
#: Arguments for EAGLE with chains of three drafts.
DRAFTS = (
    *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", OWN_DRAFT),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)

#: Settings that are independent of each other, for one server.
TOGETHER = (
    *("--enable-priority-scheduling", "--retraction-policy", "priority"),
    *("--radix-eviction-policy", "lfu", "--disaggregation-decode-polling-interval", "2"),
    *("--enable-mixed-chunk", "--enable-single-batch-overlap", "--enable-custom-logit-processor"),
    *("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
)


def environment(package: Path | None = None, model: str = MODEL) -> dict[str, str]:
    """Return variables to set before SGLang is imported: one thread, no network, one model.

    Args:
        package: SGLang's folder; None for the one of this environment.
        model: the only file of SGLang's models that is imported.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "UCX_TLS": "tcp,self",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(package, model)),
    }


def _other_models(package: Path | None, model: str) -> list[str]:
    # List the folder, because the variables must be set before SGLang is imported.
    spec = None if package else find_spec("sglang")
    folders = [package] if package else spec and spec.submodule_search_locations
    paths = [path for folder in folders or () for path in Path(folder, "srt/models").glob("*.py")]
    return sorted(path.stem for path in paths if path.stem not in (model, "__init__"))

"""Environment of a process of SGLang 0.5.23 that runs a real model without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

RELEASE = "0.5.23"
#: SGLang's file for ``models.random_qwen3``; without a limit it imports 200 others at its start.
MODEL = "qwen3"
MOONCAKE = ("--disaggregation-transfer-backend", "mooncake")
#: SGLang's files for the models of scenes, and for heads.
MODELS = (
    *(MODEL, "llama_eagle3", "deepseek_v2", "deepseek_nextn", "glm4_moe", "glm4_moe_nextn"),
    *("gpt_oss", "falcon_h1"),
)
#: SGLang refuses the name ``torch_native``; the stand-in replaces Triton by it. The other runner of
#: experts lays its weights out differently.
GPT_OSS = ("--attention-backend", "triton", "--moe-runner-backend", "triton")
PLAIN = "--disable-overlap-schedule"
#: For states of a fixed size. Without the last argument they take gigabytes.
FALCON_H1 = (
    *("--page-size", "1", "--mamba-radix-cache-strategy", "no_buffer"),
    *(PLAIN, "--max-mamba-cache-size", "60"),
)

#: A small reserve, so that small pools fill up.
SMALL = ("--num-reserved-decode-tokens", "16")
#: The part ``admission``.
REMAINING = {"SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining"}

#: Settings that are independent of each other, for one server.
TOGETHER = (
    *("--enable-priority-scheduling", "--retraction-policy", "priority"),
    *("--radix-eviction-policy", "lfu", "--disaggregation-decode-polling-interval", "2"),
    *("--enable-mixed-chunk", "--enable-single-batch-overlap", "--enable-custom-logit-processor"),
    *("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"),
)


def drafting(head: str, algorithm: str = "EAGLE", *, topk: int = 1) -> tuple[str, ...]:
    """Return arguments for drafts of three steps. ``head``: the draft model, as "@NAME"."""
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", head),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", "4"),
    )


#: Arguments for EAGLE with chains of three drafts. The model is its own draft model.
DRAFTS = drafting("@model")


def environment(package: Path | None = None, *models: str) -> dict[str, str]:
    """Return variables to set before SGLang is imported: one thread, no network, few models,
    states in float32.

    Args:
        package: SGLang's folder; None for the one of this environment.
        models: the only files of SGLang's models that are imported; by default ``MODEL``.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "UCX_TLS": "tcp,self",
        "MC_FORCE_TCP": "1",
        # The default, bfloat16, rounds at the end of each chunk, which changes answers.
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(package, models or (MODEL,))),
    }


def _other_models(package: Path | None, models: tuple[str, ...]) -> list[str]:
    # List the folder, because the variables must be set before SGLang is imported.
    spec = None if package else find_spec("sglang")
    folders = [package] if package else spec and spec.submodule_search_locations
    paths = [path for folder in folders or () for path in Path(folder, "srt/models").glob("*.py")]
    return sorted(path.stem for path in paths if path.stem not in (*models, "__init__"))

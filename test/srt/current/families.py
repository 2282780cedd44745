"""Pairs of SGLang 0.5.23 with the group ``lead`` for each family of models, as data.

``e2e/test_families.py`` runs each row. No engine is imported here.
"""

from __future__ import annotations

from current.environment import FALCON_H1, GPT_OSS
from e2e.families import BOTH, Run

ARCHITECTURES = {
    "deepseek_v3": "deepseek_v2",
    "deepseek_v32": "deepseek_v2",
    **{name: name for name in ("qwen3_moe", "gpt_oss", "falcon_h1")},
}
"""Family of ``models.families`` -> SGLang's file for it."""
ARGUMENTS = {"gpt_oss": GPT_OSS, "falcon_h1": FALCON_H1}
"""More arguments of each server."""
PAGES = {"deepseek_v32": 64, "falcon_h1": 1}
"""Tokens of a page, if not 16: SGLang's index, and a tree with states, support only this size."""

RUNS: tuple[Run, ...] = (
    Run(
        "deepseek_v3",
        parts=(*BOTH, "retract"),
        setup=("prefill_tp2", "decode_tp2"),
        nightly=False,
    ),
    Run(
        "deepseek_v3",
        backend="mooncake",
        parts=(*BOTH, "retract"),
        setup=("prefill_dp", "decode_dp", "ep"),
        nightly=False,
    ),
    Run("qwen3_moe", parts=BOTH, nightly=False),
    Run("gpt_oss", parts=(*BOTH, "retract"), nightly=False),
    Run("deepseek_v32", 64, parts=(*BOTH, "retract"), nightly=False),
    Run("falcon_h1", 1, "mooncake", (*BOTH, "retract"), nightly=False),
)

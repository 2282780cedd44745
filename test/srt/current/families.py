"""Pairs of SGLang 0.5.23 with the group ``lead`` for each family of models, as data.

``e2e/test_families.py`` runs each row. No engine is imported here.
"""

from __future__ import annotations

from e2e.families import BOTH, Run

ARCHITECTURES = {"deepseek_v3": "deepseek_v2", "qwen3_moe": "qwen3_moe"}
"""Family of ``models.families`` -> SGLang's file for it."""

RUNS: tuple[Run, ...] = (
    Run("deepseek_v3", parts=BOTH, nightly=False),
    Run("deepseek_v3", parts=(*BOTH, "retract"), nightly=False),
    Run("deepseek_v3", parts=BOTH, setup=("prefill_tp2", "decode_tp2"), nightly=False),
    Run(
        "deepseek_v3",
        parts=(*BOTH, "retract"),
        setup=("prefill_dp", "decode_dp", "ep"),
        nightly=False,
    ),
    Run("qwen3_moe", parts=BOTH, nightly=False),
)

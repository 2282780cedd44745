"""The pairs that serve each family of models in ``test_families.py``, as data.

The published matrix is generated from this table, so it imports no engine. A combination without a
row was not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal

Part = Literal["radix", "local", "buffer_only", "stock", "stock_prefill", "retract"]
"""radix: the decode radix cache. local: turns that decode computes. buffer_only: HiCache's staging
buffer. stock: no flag of this package on decode. stock_prefill: a prefill server without this
package. retract: decode retracts some of its requests every seventh step."""
Setup = Literal[
    "prefill_tp2",
    "decode_tp2",
    "prefill_dp",
    "decode_dp",
    "ep",
    "nextn",
    "fp8",
    "no_swa_pool",
    "no_prefill_tree",
]
"""prefill_tp2, decode_tp2: two ranks of tensor parallelism. prefill_dp, decode_dp: two ranks of
attention data parallelism. ep: two ranks of expert parallelism on both servers. nextn: speculation
by the model's own MTP head. fp8: KV in fp8. no_swa_pool: ``--disable-hybrid-swa-memory`` on both
servers. no_prefill_tree: ``--disable-radix-cache`` on prefill, where SGLang's tree with recurrent
states has pages of one token."""


NEW_TOKENS = {"deepseek_v32": 4}
"""Tokens of an answer, if not 10. With each further token, rounding may change which tokens DSA's
index chooses."""


@dataclass(frozen=True)
class Run:
    """One pair of servers, and the parts of the package that it runs."""

    family: str
    """Name in ``models.families``."""
    page: int = 16
    """Tokens of a page."""
    backend: Literal["nixl", "mooncake"] = "nixl"
    parts: tuple[Part, ...] = ("radix",)
    setup: tuple[Setup, ...] = ()
    nightly: bool = True
    """False: also run for every change."""
    seed: int = 0
    """Seed of the prompts, chosen with ``rounding.py``. A row says why it is not 0."""

    @property
    def id(self) -> str:
        """The test's id, in ``test_families.py`` or ``test_families_store.py``."""
        return "-".join((self.family, self.backend, f"page{self.page}", *self.parts, *self.setup))


BOTH: tuple[Part, ...] = ("radix", "local")


def _everywhere(family: str, *also: Setup) -> tuple[Run, ...]:
    """Return a row for each transfer backend, with two ranks on one side."""
    return (
        Run(family, 16, "nixl", BOTH, ("decode_tp2", *also)),
        Run(family, 1, "mooncake", BOTH, ("prefill_tp2", *also)),
    )


DEEPSEEK_V3 = (
    Run("deepseek_v3", parts=BOTH, nightly=False),
    Run("deepseek_v3", 1, "mooncake", BOTH),
    Run("deepseek_v3", parts=BOTH, setup=("prefill_tp2",)),
    Run("deepseek_v3", parts=BOTH, setup=("decode_tp2",)),
    Run("deepseek_v3", setup=("prefill_dp",)),
    Run("deepseek_v3", parts=BOTH, setup=("decode_dp",)),
    Run("deepseek_v3", setup=("ep",)),
    Run("deepseek_v3", parts=BOTH, setup=("fp8",)),
    Run("deepseek_v3", parts=("radix", "retract")),
    Run("deepseek_v3", parts=("radix", "stock_prefill")),
    Run("deepseek_v3_nextn", parts=BOTH, setup=("nextn",)),
)
"""MLA and experts: DeepSeek V3, Kimi K2."""

DSA = (
    Run("deepseek_v32", 64, parts=BOTH, nightly=False),
    Run("deepseek_v32", 64, "mooncake", BOTH, ("prefill_tp2",)),
    Run("deepseek_v32", 64, parts=("radix", "local", "retract"), setup=("decode_tp2",)),
)
"""Sparse attention with an index, in pages of 64 tokens: DeepSeek V3.2, GLM-5."""

HEADS = (
    *chain.from_iterable(
        map(_everywhere, ("qwen3_moe", "glm4_moe", "minimax_m2", "llama", "gemma2"))
    ),
    Run("qwen3_moe", setup=("decode_dp",)),
    Run("qwen3_moe", setup=("ep",)),
)
"""Keys and values by head, one pool; with experts but for Llama 3 and Gemma 2."""

WINDOWS = (
    *_everywhere("gpt_oss", "no_swa_pool"),
    Run("gpt_oss", parts=("stock",)),
    Run("gpt_oss", 1, "mooncake", ("stock",)),
)
"""Layers with a window, which have a second pool without ``--disable-hybrid-swa-memory``."""

RECURRENT = (
    Run("qwen3_next", 1, parts=("stock",)),
    Run("qwen3_next", 1, "mooncake", ("stock",)),
    Run("qwen3_next", 1),
    Run("qwen3_next", 1, "mooncake"),
    Run("qwen3_next", 16, setup=("no_prefill_tree",)),
    Run("qwen3_next", 1, parts=("radix", "retract"), setup=("prefill_tp2", "decode_tp2")),
    Run("qwen3_next", 1, setup=("decode_dp",)),
    Run("falcon_h1", 1, parts=("radix", "retract")),
    Run("nemotron_h", 1, parts=("radix", "retract")),
)
"""Layers with a state of fixed size: gated delta nets, Mamba2."""

RUNS: tuple[Run, ...] = (*DEEPSEEK_V3, *DSA, *HEADS, *WINDOWS, *RECURRENT)

STORE: tuple[Part, ...] = ("buffer_only",)
STORED: tuple[Run, ...] = (
    Run("deepseek_v3", parts=STORE),
    Run("deepseek_v3", parts=STORE, setup=("prefill_tp2", "ep")),
    Run("deepseek_v3", parts=STORE, setup=("prefill_tp2", "prefill_dp")),
    Run("deepseek_v3_nextn", parts=STORE, setup=("nextn",)),
    Run("deepseek_v32", 64, parts=STORE),
    Run("qwen3_moe", parts=STORE),
    Run("glm4_moe", parts=STORE),
    Run("minimax_m2", parts=STORE),
    Run("llama", parts=STORE),
    Run("gemma2", parts=STORE),
    Run("gpt_oss", parts=STORE, setup=("no_swa_pool",)),
)
"""Two servers that write to one store and read from it. Neither is a decode server, and no KV is
sent, so ``backend`` has no effect."""

WHOLE: tuple[Run, ...] = (
    Run("deepseek_v3", parts=(*BOTH, *STORE)),
    Run("deepseek_v3", 64, "mooncake", (*BOTH, *STORE), ("fp8",)),
    Run("deepseek_v32", 64, parts=(*BOTH, *STORE)),
)
"""A pair whose decode server writes to the store that its prefill server reads from."""

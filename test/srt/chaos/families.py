"""The families of models that the pair of an arm can serve, and how its servers are started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.harness.fleet import PairConfig
from benchmark.harness.models import random_qwen3
from chaos.plan import CURRENT_EVERY_S, HEAVY_EVERY_S
from e2e.support import dp_attention


@dataclass(frozen=True)
class Served:
    """Servers of a family."""

    page_size: int
    arguments: tuple[str, ...] = ()
    """Of all servers, the aggregated one included."""
    has_decode_dp: bool = False
    """Decode has two ranks of attention data parallelism."""
    fault_every_s: float = HEAVY_EVERY_S


DENSE = Served(1)
"""``models.random_qwen3``, of any page size."""
FAMILIES = {
    # Three schedulers on few cores: a restart takes 24 s.
    "deepseek_v3": Served(16, has_decode_dp=True, fault_every_s=CURRENT_EVERY_S),
    "deepseek_v32": Served(64),
    # Fewer states than requests at once; SGLang's default takes gigabytes.
    "qwen3_next": Served(1, ("--max-mamba-cache-size", "12")),
}
"""Of ``models.families``."""


def make_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Make a model of a family, or a dense one where that is empty. Return its folder."""
    if not family:
        return random_qwen3(folder, seed)
    from models.families import build  # torch, which the rest does without

    return build(folder, family, seed)


def serve(config: PairConfig, family: str) -> PairConfig:
    """Return ``config`` with what the servers of the family need."""
    served = FAMILIES.get(family, DENSE)
    own = dp_attention() if served.has_decode_dp else ()
    return replace(
        config,
        decode_tp=2 if served.has_decode_dp else 1,
        prefill_args=(*config.prefill_args, *served.arguments),
        decode_args=(*config.decode_args, *served.arguments, *own),
    )

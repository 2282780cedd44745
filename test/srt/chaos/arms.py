"""Arms of a chaos run: their servers and the faults that these meet."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from chaos.families import FAMILIES
from chaos.plan import HEAVY, LIGHT, LOCAL, STORE, WEIGHTS, Faults

BACKENDS = ("nixl", "mooncake")
PAGE_SIZES = (16, 1)
STAGED_PAGE_SIZES = (16, 64)
MIXED_PAGE_SIZES = (1, 16, 16, 64)
"""Page sizes of a plain pair and of the whole system, for each backend."""


@dataclass(frozen=True)
class Arm:
    """A pair of fresh servers and their parts."""

    backend: str
    page_size: int
    staged: bool = False
    """Prefill has buffer-only HiCache before a Mooncake store."""
    local: bool = False
    """Decode computes short turns itself."""
    whole: bool = False
    """Both of these; decode writes to the store too, and the weights of both servers change."""
    current: str = ""
    """On SGLang 0.5.23: "lead", or "stock"."""
    family: str = ""
    """A key of ``chaos.families.FAMILIES``. Empty: a dense model."""

    @property
    def name(self) -> str:
        parts = {"hicache": self.staged, "local": self.local}
        parts = {"whole": True} if self.whole else {**parts, self.current: bool(self.current)}
        names = [name for name, is_on in parts.items() if is_on]
        family = [self.family] if self.family else []
        return "-".join([*family, self.backend, str(self.page_size), *names])

    @property
    def faults(self) -> Faults:
        """Kinds of faults that this arm's servers meet."""
        asks_decode = self.local or bool(self.current)
        heavy = (*HEAVY, *STORE * self.staged, *WEIGHTS * self.whole)
        return Faults(heavy, (*LIGHT, *LOCAL * asks_decode))


WHOLE: dict[str, Any] = {"staged": True, "local": True, "whole": True}


def make_arms(
    backend: str, page_size: str, parts: dict[str, Any] | None, family: str = ""
) -> list[Arm]:
    """Return the arms of a run.

    Args:
        backend: one of ``BACKENDS``, or "both".
        page_size: a number, or "both".
        parts: of all arms. None gives each backend an arm of a plain pair and one of the whole
            system; with a family, of a plain pair alone.
        family: a key of ``FAMILIES``, or empty. Its page size replaces "both".
    """
    if family:
        parts = {**(parts or {}), "family": family}
        page_size = str(FAMILIES[family].page_size) if page_size == "both" else page_size
    if parts is None:
        kinds = itertools.product(BACKENDS, ({}, WHOLE))
        mixed = [(*kind, page) for kind, page in zip(kinds, MIXED_PAGE_SIZES, strict=True)]
    else:
        both = STAGED_PAGE_SIZES if parts.get("staged") else PAGE_SIZES
        pages = both if page_size == "both" else both[:1]
        mixed = list(itertools.product(BACKENDS, (parts,), pages))
    return [
        Arm(name, page if page_size == "both" else int(page_size), **of_arm)
        for name, of_arm, page in mixed
        if backend in (name, "both")
    ]

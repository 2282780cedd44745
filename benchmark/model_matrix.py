"""Families of models that were run with each part of the package: tables of docs/models.md.

A cell is *run* only if a row of the tests' parameters covers it. It is *refused* if a server's
check at start refuses these settings. All other cells are *accepted*: no check refuses them, and no
test runs them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from benchmark.harness.models import REPOSITORY
from benchmark.harness.report import markdown
from sglang.srt.disaggregation.lead import settings
from sglang.srt.patchset import refusals

if (TESTS := str(REPOSITORY / "test/srt")) not in sys.path:
    sys.path.append(TESTS)

from current import families as current  # noqa: E402
from e2e import families as rows  # noqa: E402
from e2e.families import Part, Run  # noqa: E402


@dataclass(frozen=True)
class Family:
    """Models with the same kind of KV."""

    keys: tuple[str, ...]
    """Keys of ``models.families``."""
    names: str
    """Names on the hub."""
    kv: str
    one_pool: bool = False
    """True: served with ``--disable-hybrid-swa-memory`` on both servers."""
    beside: Literal["", "index", "states", "windows"] = ""
    """The kind of pool beside the KV."""

    def has(self, run: Run) -> bool:
        """True if ``run`` serves such a model."""
        return run.family in self.keys and ("no_swa_pool" in run.setup) == self.one_pool


FAMILIES = (
    Family(
        ("deepseek_v3", "deepseek_v3_nextn"),
        "DeepSeek V3, R1 and Kimi K2",
        "latent (MLA), experts",
    ),
    Family(
        ("deepseek_v32",),
        "DeepSeek V3.2 and GLM-5",
        "latent and index (DSA), experts",
        beside="index",
    ),
    Family(("qwen3_moe",), "Qwen3-MoE", "heads, experts"),
    Family(("glm4_moe",), "GLM-4.5", "heads, experts"),
    Family(("minimax_m2",), "MiniMax M2", "heads, experts"),
    Family(("llama",), "Llama 3", "heads"),
    Family(("gemma2",), "Gemma 2", "heads, windows in one pool"),
    Family(
        ("gpt_oss",),
        "gpt-oss with `--disable-hybrid-swa-memory` on both servers",
        "heads, windows in one pool, experts",
        one_pool=True,
    ),
    Family(
        ("gpt_oss",),
        "gpt-oss",
        "heads, a second pool for windows, experts",
        beside="windows",
    ),
    Family(
        ("qwen3_next",),
        "Qwen3-Next",
        "heads, recurrent states (gated delta nets), experts",
        beside="states",
    ),
    Family(
        ("falcon_h1", "nemotron_h"),
        "Falcon-H1 and Nemotron-H",
        "heads, recurrent states (Mamba2)",
        beside="states",
    ),
)

# ---- the meaning of cells ----

BACKENDS = ("nixl", "mooncake")
Args = Mapping[str, Any]

_DECODE: Args = {
    "num_reserved_decode_tokens": 512,
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "nixl",
    "disaggregation_decode_enable_radix_cache": True,
}
_STAGED: Args = {
    "hicache_host_memory_mode": "buffer_only",
    "hicache_storage_backend": "mooncake",
    "hicache_write_policy": "write_through",
}
#: Feature -> arguments of the server that has its flag, and the parts of rows that run it.
FEATURES: Mapping[str, tuple[Args, frozenset[Part]]] = {
    "radix": (_DECODE, frozenset({"radix"})),
    "local turns": (
        {**_DECODE, "disaggregation_decode_local_tokens": 256},
        frozenset({"local"}),
    ),
    "buffer-only": (
        {**_STAGED, "disaggregation_mode": "prefill", "enable_hierarchical_cache": True},
        frozenset({"buffer_only"}),
    ),
    "decode writes": (
        {**_DECODE, **_STAGED, "disaggregation_decode_enable_offload_kvcache": True},
        frozenset({"radix", "buffer_only"}),
    ),
}
#: Column -> arguments, and the setups of rows that run it.
SETUPS: Mapping[str, tuple[Args, frozenset[str]]] = {
    "tensor parallelism": ({"tp_size": 2}, frozenset({"prefill_tp2", "decode_tp2"})),
    "attention data parallelism": (
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        frozenset({"prefill_dp", "decode_dp"}),
    ),
    "expert parallelism": ({"tp_size": 2, "ep_size": 2}, frozenset({"ep"})),
    "speculation": (
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
        frozenset({"nextn"}),
    ),
    "fp8 KV": ({"kv_cache_dtype": "fp8_e4m3"}, frozenset({"fp8"})),
}


class _Arguments(SimpleNamespace):
    """The part of ``ServerArgs`` that the checks read."""

    def __getattr__(self, name: str) -> Any:
        return None


def _arguments(*parts: Args) -> Any:
    return _Arguments(**{name: value for args in parts for name, value in args.items()})


def _config(family: Family) -> Any:
    """Return the part of ``ModelConfig`` that the checks read."""
    kinds = {"states": "mamba2_cache_params", "index": "index_topk"}
    has = {kinds[family.beside]: 2048} if family.beside in kinds else {}
    hf_config, has_window_pool = type("HfConfig", (), has)(), family.beside == "windows"
    return SimpleNamespace(model_path="MODEL", is_hybrid_swa=has_window_pool, hf_config=hf_config)


def refused_here(family: Family, *parts: Args) -> str | None:
    """Return the error of a server of 0.5.10.post1, or None."""
    args = _arguments(*parts)
    try:
        refusals.check_given(args)
        refusals.check_model(args, _config(family))
    except ValueError as error:
        return str(error).split(". ")[0] + "."
    return None


def refused_there(*parts: Args) -> str | None:
    """Return the error of a server of 0.5.23 with the group ``lead``, or None. With recurrent
    states, ``--mamba-radix-cache-strategy`` is ``no_buffer``."""
    args = _arguments(*parts)
    for setting, why in (settings.ON_BOTH | settings.ON_DECODE).items():
        if settings.is_given(args, setting):
            return f"0.5.23: {setting}: {why}."
    return None


# ---- the matrix ----


@dataclass(frozen=True)
class Test:
    """A row of a table of tests, as pytest names it."""

    file: str
    function: str
    run: Run

    @property
    def id(self) -> str:
        return f"{self.file}::{self.function}[{self.run.id}]"


_E2E = "test/srt/e2e"
TESTS_HERE = (
    *(Test(f"{_E2E}/test_families.py", "test_answers", run) for run in rows.RUNS),
    *(
        Test(f"{_E2E}/test_families_store.py", "test_another_server_finds_it", run)
        for run in rows.STORED
    ),
    *(
        Test(f"{_E2E}/test_families_store.py", "test_prefill_finds_what_decode_wrote", run)
        for run in rows.WHOLE
    ),
)
TESTS_THERE = tuple(
    Test("test/srt/current/e2e/test_families.py", "test_answers", run) for run in current.RUNS
)


@dataclass
class Matrix:
    """The tables of the page, which share the numbers of tests and the letters of reasons."""

    tests: tuple[Test, ...] = (*TESTS_HERE, *TESTS_THERE)
    reasons: list[str] = field(default_factory=list)
    here: list[list[str]] = field(default_factory=list)
    setups: list[list[str]] = field(default_factory=list)
    there: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for family in FAMILIES:
            self.here.append([family.names, family.kv, *self._base(family)])
            served = [n for n, (args, _) in FEATURES.items() if not refused_here(family, args)]
            if served:
                self.setups.append([family.names, *self._with_setups(family, served)])
            self.there.append([family.names, *self._on_current(family)])

    def _base(self, family: Family) -> Iterator[str]:
        yield self._ran(TESTS_HERE, family, {"stock"}) or "accepted"
        for feature in ("radix", "local turns"):
            for backend in BACKENDS:
                yield self._cell(family, feature, backend=backend) or "accepted"
        for feature in ("buffer-only", "decode writes"):
            yield self._cell(family, feature) or "accepted"

    def _with_setups(self, family: Family, served: list[str]) -> Iterator[str]:
        for setup in SETUPS:
            parts: dict[str, list[str]] = {}
            for feature in served:
                parts.setdefault(self._cell(family, feature, setup), []).append(feature)
            parts.pop("", None)
            lines = [f"{', '.join(names)}: {cell}" for cell, names in parts.items()]
            yield "<br>".join(lines) or "accepted"

    def _cell(
        self, family: Family, feature: str, setup: str = "", backend: str = "", later: bool = False
    ) -> str:
        """Return the tests, or the letter of a refusal; empty if accepted. ``later``: on 0.5.23."""
        feature_args, parts = FEATURES[feature]
        backend_args = {"disaggregation_transfer_backend": backend} if backend else {}
        setup_args = SETUPS[setup][0] if setup else {}
        args = (feature_args, backend_args, setup_args)
        why = refused_there(*args) if later else refused_here(family, *args)
        tests = TESTS_THERE if later else TESTS_HERE
        return self._refused(why) or self._ran(tests, family, parts, setup, backend)

    def _on_current(self, family: Family) -> Iterator[str]:
        for backend in BACKENDS:
            yield self._cell(family, "local turns", backend=backend, later=True) or "accepted"
        for setup in SETUPS:
            yield self._cell(family, "local turns", setup, later=True) or "accepted"

    def _ran(
        self,
        tests: Iterable[Test],
        family: Family,
        parts: Set[Part],
        setup: str = "",
        backend: str = "",
    ) -> str:
        """Return the numbers of the tests; bold: in every run."""
        known = frozenset[str]().union(*(names for _, names in SETUPS.values()))
        of_family = [
            test
            for test in tests
            if family.has(test.run)
            and parts <= {*test.run.parts}
            and backend in ("", test.run.backend)
        ]
        if setup:
            matching = [test for test in of_family if SETUPS[setup][1] & {*test.run.setup}]
        else:  # use tests with other settings only if there is no test without
            matching = [test for test in of_family if not known & {*test.run.setup}] or of_family
        numbers = ((self.tests.index(test) + 1, test.run.nightly) for test in matching)
        shown = (f"{number}" if nightly else f"**{number}**" for number, nightly in numbers)
        return f"run {', '.join(shown)}" if matching else ""

    def _refused(self, why: str | None) -> str:
        if why is None:
            return ""
        if why not in self.reasons:
            self.reasons.append(why)
        return f"refused {_letter(self.reasons.index(why))}"


def _letter(index: int) -> str:
    return chr(ord("a") + index)


@cache
def matrix() -> Matrix:
    return Matrix()


# ---- the tables ----


def here() -> str:
    """Return the table of docs/models.md: parts of the package by family."""
    columns = (
        *("model", "KV and layers", "no flag", "radix, NIXL", "radix, Mooncake"),
        *("local turns, NIXL", "local turns, Mooncake", "buffer-only", "decode writes"),
    )
    return markdown(columns, matrix().here)


def setups() -> str:
    """Return the table of docs/models.md: the same with other settings of a fleet."""
    return markdown(("model", *SETUPS), matrix().setups)


def there() -> str:
    """Return the table of docs/models.md: the group ``lead`` by family."""
    return markdown(("model", "NIXL", "Mooncake", *SETUPS), matrix().there)


def reasons() -> str:
    """Return the list of docs/models.md: why a cell is refused."""
    flags = re.compile(r"(--[\w-]+(?: buffer_only| NEXTN| EAGLE)?)")
    coded = (flags.sub(r"`\1`", reason) for reason in matrix().reasons)
    return "\n".join(f"- {_letter(n)}: {why}" for n, why in enumerate(coded)) + "\n"


def tests() -> str:
    """Return the list of docs/models.md: the tests that the cells name."""
    lines = []
    file = ""
    for number, test in enumerate(matrix().tests, 1):
        if test.file != file:
            file = test.file
            lines.append(f"\n[`{file}`](../{file}):\n")
        when = "at night" if test.run.nightly else "**in every run**"
        lines.append(f"{number}. `{test.function}[{test.run.id}]` {when}")
    return "\n".join(lines).lstrip("\n") + "\n"


#: Part, as README.md names it -> its columns in ``here``.
PARTS = {"the decode radix cache": (3, 4), "local turns": (5, 6), "buffer-only HiCache": (7,)}


def short() -> str:
    """Return the sentence of README.md: the families that were run with each part."""
    alike: dict[str, list[str]] = {}
    for row in matrix().here:
        states: dict[str, list[str]] = {}
        for part, columns in PARTS.items():
            words = {row[column].partition(" ")[0] for column in columns}
            state = next(word for word in ("run", "accepted", "refused") if word in words)
            states.setdefault(state, []).append(part)
        text = ", ".join(f"{state} with {_listed(parts)}" for state, parts in states.items())
        alike.setdefault(text[0].upper() + text[1:], []).append(row[0])
    lines = (f"{text}: {'; '.join(names)}." for text, names in alike.items())
    about = "[matrix and tests](docs/models.md); R1, Kimi K2 and GLM-5 share KV with what was run"
    return f"By family ({about}). {' '.join(lines)}\n"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

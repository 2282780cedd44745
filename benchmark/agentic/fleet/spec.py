"""``fleet.yaml``: which servers there are, by role, and how they are spoken to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from benchmark.agentic.load.prepare import Endpoint
from benchmark.agentic.router.policies import POLICIES
from benchmark.traces.record import BLOCK_TOKENS

T = TypeVar("T")
Positive = Annotated[int, msgspec.Meta(gt=0)]
Above = Annotated[float, msgspec.Meta(gt=0)]
RIG = Path(__file__).with_name("rig.yaml")
NONE = "none"
SERVERS = "{servers}"
"""In an arm's title: how many servers of which role."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request meets it with both times within these, seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill server, and where decode asks for its addresses."""

    url: str
    bootstrap_port: int = 8998

    def __post_init__(self) -> None:
        _url(self.url)


class Roles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses of servers."""

    aggregated: tuple[str, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    decode: tuple[str, ...] = ()
    router: str | None = None
    """Requests go there. Without it they go to the only server or pair, or through our router."""
    store: str | None = None
    """Of a hierarchical cache; its metrics are read too."""

    def __post_init__(self) -> None:
        for url in (*self.aggregated, *self.decode, self.router, self.store):
            _url(url)
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("`prefill` and `decode` must be given together")


class Setup(Roles, frozen=True):
    """Servers that answer requests together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.aggregated or self.decode or self.router):
            raise ValueError("a setup needs `aggregated`, `prefill` and `decode`, or `router`")

    @property
    def engines(self) -> dict[str, str]:
        """URL -> role."""
        roles = dict.fromkeys(self.aggregated, "aggregated")
        roles |= {server.url: "prefill" for server in self.prefill}
        return roles | dict.fromkeys(self.decode, "decode")


Role = Literal["aggregated", "prefill", "decode"]


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host memory of an arm's aggregated and prefill servers, tokens of KV: a hierarchical cache,
    perhaps over one Mooncake store, which lives in their memory."""

    host_tokens: Positive
    """Of each server's host pool, or of its staging buffer."""
    shared_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of each server's part of the store, which all of them read; 0: there is no store."""
    buffer_only: bool = False
    writes: bool = False
    """Decode servers have the same, and write their KV to the store."""

    def __post_init__(self) -> None:
        if (self.buffer_only or self.writes) and not self.shared_tokens:
            raise ValueError("`buffer_only` and `writes` need `shared_tokens`")
        if self.writes and not self.buffer_only:
            raise ValueError("`writes` needs `buffer_only`")


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setup. ``aggregated`` to ``store`` say what the rig starts; a fleet by address has it
    under ``setup``."""

    title: str
    """``{servers}`` in it becomes how many there are."""
    setup: str | None = None
    """Name of a fleet's setup; None: the arm's own name."""
    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    variant: Literal["stock", "patched", "radix", "local"] = "stock"
    """The stock release, this package without a flag, with the decode radix cache, and with local
    turns too, where decode expects to be sooner. Without a flag there is always an arm: what NIXL's
    sleeping thread gains is not the flag's."""
    local_tokens: int = 0
    """Of ``local``: turns with more new tokens go to prefill."""
    args: dict[Role, tuple[str, ...]] = {}
    """Further arguments of the servers of a role."""
    env: dict[str, str] = {}
    """Variables of all servers."""
    venv: str | None = None
    """Folder of the environment of SGLang 0.5.23 in the repository, whose servers are measured."""
    store: Store | None = None
    policy: str = "linear"
    """Of our router, or ``none``; by address, of our router where it is needed. Not SGLang's: it
    keeps what it believes of the workers' caches when they are flushed, and sends several tokens
    at once."""
    heavy_tokens: int | None = None
    """Of our router, with a pair beside aggregated servers: requests with more uncached tokens go
    to the pair. As long as in the trace, before scaling."""
    router_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.variant == "local" and self.local_tokens < 1:
            raise ValueError("`local_tokens` must be 1 or more")
        if self.policy not in (*POLICIES, NONE):
            raise ValueError(f"`policy` is one of {', '.join((*POLICIES, NONE))}")
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("`prefill` and `decode` must be given together")

    def routing(self, block_tokens: int) -> tuple[str, ...]:
        """Arguments of our router, for blocks of so many tokens."""
        if self.heavy_tokens is None:
            return self.router_args
        heavy = max(1, self.heavy_tokens * block_tokens // BLOCK_TOKENS)
        return ("--heavy-threshold", str(heavy), *self.router_args)

    @property
    def sleeps(self) -> bool:
        """Whether its servers may sleep while they are idle (``--sleep-on-idle``). SGLang's prefill
        server would sleep up to a second on a handshake, and its server with a store while that
        answers."""
        ours = self.variant != "stock" and self.venv is None
        return ours or not (self.prefill or self.store)

    @property
    def servers(self) -> dict[str, int]:
        """By role."""
        return {"aggregated": self.aggregated, "prefill": self.prefill, "decode": self.decode}

    @property
    def shown(self) -> str:
        """The title with the servers that there are."""
        return self.title.replace(SERVERS, counted(self.servers))


def counted(servers: Mapping[str, int]) -> str:
    """``2 aggregated``, ``1P 1D``, or both; a router may hide them."""
    own = f"{servers['aggregated']} aggregated" if servers["aggregated"] else ""
    pair = f"{servers['prefill']}P {servers['decode']}D" if servers["decode"] else ""
    return ", ".join(filter(None, (own, pair))) or "behind a router"


class Rig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Servers that are started here, on a CPU, for each arm."""

    pool_tokens: int = 8800
    """KV pool of every server."""
    chunk_tokens: int = 512
    """Of a prefill step."""
    reserve_tokens: int | None = None
    """``--num-reserved-decode-tokens``; None: a block, as SGLang's 512 to the trace's."""
    shape: dict[str, int] = {}
    """Of the random model; see ``benchmark.harness.models.random_qwen3``."""


class FleetFile(Roles, frozen=True):
    """The file. Roles at its top are the setups ``aggregated``, ``pd`` and ``router``."""

    setups: dict[str, Setup] = {}
    """More of them, or all, by name: an arm of a study that has the name is measured there."""
    rig: Rig | None = None
    """Instead of addresses."""
    endpoint: Endpoint = "generate"
    model: str = "default"
    """As OpenAI's endpoints are asked for it."""
    tokenizer: str = "builtin"
    """Of AIPerf, for prompts of the trace's lengths: a model's name, or AIPerf's own."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the servers."""
    headers: dict[str, str] = {}
    vocabulary: tuple[int, int] = (1000, 30000)
    """Token ids that prompts are drawn from: from, and up to."""
    block_tokens: Positive = BLOCK_TOKENS
    """A block of the trace's 512 tokens becomes so many."""
    answers: Above | None = None
    """Share of the recorded answers' tokens; None: scaled as the blocks are."""
    max_answer_tokens: Positive | None = None
    """Longer answers are cut to it."""
    pool_tokens: Positive | None = None
    """KV pool of a server that decodes; on the rig it is the rig's. Requests longer than half of it
    are left out, and counted."""
    slo: Slo | None = None
    """Instead of the study's."""
    flush: bool = True
    """Empty the servers' caches before each load (``/flush_cache``)."""
    warm_up: int = 4
    """Requests to each setup before its first load."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.named()
        if self.rig is None and not names:
            raise ValueError("no servers: give `aggregated`, `prefill` and `decode`, or `router`")
        if self.rig is not None and names:
            raise ValueError("`rig` starts its own servers: remove the addresses")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"`api_key_env`: the environment has no {self.api_key_env}")

    def named(self) -> dict[str, Setup]:
        """All setups by name."""
        found = dict(self.setups)
        if self.aggregated:
            found["aggregated"] = Setup(aggregated=self.aggregated, store=self.store)
        if self.prefill and self.decode:
            found["pd"] = Setup(prefill=self.prefill, decode=self.decode, store=self.store)
        if self.router:
            found["router"] = Setup(router=self.router, store=self.store)
        return found

    @property
    def all_headers(self) -> dict[str, str]:
        """With the key."""
        if not self.api_key_env:
            return self.headers
        return {**self.headers, "Authorization": f"Bearer {os.environ[self.api_key_env]}"}

    def public(self) -> dict[str, Any]:
        """For files that are passed on: no key, no header, no address."""
        sizes = ("endpoint", "model", "block_tokens", "answers", "max_answer_tokens", "flush")
        about: dict[str, Any] = {name: getattr(self, name) for name in sizes}
        about["pool_tokens"] = self.rig.pool_tokens if self.rig else self.pool_tokens
        about["rig"] = self.rig is not None
        return about


def load(path: Path, kind: type[T]) -> T:
    """A YAML file as a record.

    Raises:
        ValueError: the file is not one; the message names file and key.
    """
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=kind)  # JSON is YAML too
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _url(text: str | None) -> None:
    if text is not None and urlsplit(text).scheme not in ("http", "https"):
        raise ValueError(f"{text!r} is not an http URL")

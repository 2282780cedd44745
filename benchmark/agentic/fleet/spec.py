"""``fleet.yaml``: the servers by role, and how to reach them."""

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
"""Placeholder in an arm's title: the number of servers by role."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits in seconds; a request meets the SLO within both."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill server, and the port of its bootstrap server."""

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
    """Requests go to it. None: they go to the only server or pair, or through our router."""
    store: str | None = None
    """Store of a hierarchical cache; its metrics are read too."""

    def __post_init__(self) -> None:
        for url in (*self.aggregated, *self.decode, self.router, self.store):
            _url(url)
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("`prefill` and `decode` must be given together")


class Setup(Roles, frozen=True):
    """Servers that serve requests together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.aggregated or self.decode or self.router):
            raise ValueError("a setup needs `aggregated`, `prefill` and `decode`, or `router`")

    @property
    def engines(self) -> dict[str, str]:
        """URL -> role of each engine."""
        roles = dict.fromkeys(self.aggregated, "aggregated")
        roles |= {server.url: "prefill" for server in self.prefill}
        return roles | dict.fromkeys(self.decode, "decode")


Role = Literal["aggregated", "prefill", "decode"]


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host memory of an arm's aggregated and prefill servers, in tokens of KV: a hierarchical
    cache, with or without a Mooncake store, which uses the memory of these servers."""

    host_tokens: Positive
    """Size of each server's host pool or staging buffer."""
    shared_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Memory that each server gives to the store, which all of them read; 0: no store."""
    buffer_only: bool = False
    writes: bool = False
    """Decode servers have the same host memory, and write their KV to the store."""

    def __post_init__(self) -> None:
        if (self.buffer_only or self.writes) and not self.shared_tokens:
            raise ValueError("`buffer_only` and `writes` need `shared_tokens`")
        if self.writes and not self.buffer_only:
            raise ValueError("`writes` needs `buffer_only`")


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setup. The rig starts ``aggregated`` to ``store``; in a fleet by address, ``setup`` names
    the servers."""

    title: str
    """``{servers}`` in it is replaced by the number of servers."""
    setup: str | None = None
    """Name of a fleet's setup; None: that of the arm."""
    aggregated: int = 0
    prefill: int = 0
    decode: int = 0
    variant: Literal["stock", "patched", "radix", "local"] = "stock"
    """``stock``: the stock release; ``patched``: this package without a flag; ``radix``: with the
    decode radix cache; ``local``: with local turns too, when decode expects to be faster. A study
    always has an arm without a flag, to tell the flag's gain from that of NIXL's sleeping
    thread."""
    local_tokens: int = 0
    """For ``local``: turns with more new tokens go to prefill."""
    args: dict[Role, tuple[str, ...]] = {}
    """Further server arguments, by role."""
    env: dict[str, str] = {}
    """Environment variables of all servers."""
    venv: str | None = None
    """To measure servers of SGLang 0.5.23: folder of its environment in the repository."""
    backend: Literal["nixl", "mooncake"] = "nixl"
    """Transfer backend of a pair."""
    store: Store | None = None
    policy: str = "linear"
    """Policy of our router, or ``none``. A fleet by address uses it only if our router is needed.
    SGLang's router is not used: when workers are flushed it keeps its view of their caches, and it
    sends several tokens at once."""
    heavy_tokens: int | None = None
    """For our router, if a pair runs beside aggregated servers: requests with more uncached tokens
    go to the pair. In tokens of the trace, before scaling."""
    router_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.variant == "local" and self.local_tokens < 1:
            raise ValueError("`local_tokens` must be 1 or more")
        if self.policy not in (*POLICIES, NONE):
            raise ValueError(f"`policy` is one of {', '.join((*POLICIES, NONE))}")
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("`prefill` and `decode` must be given together")

    def routing(self, block_tokens: int) -> tuple[str, ...]:
        """Return the arguments of our router, for blocks of ``block_tokens`` tokens."""
        if self.heavy_tokens is None:
            return self.router_args
        heavy = max(1, self.heavy_tokens * block_tokens // BLOCK_TOKENS)
        return ("--heavy-threshold", str(heavy), *self.router_args)

    @property
    def sleeps(self) -> bool:
        """True if its servers may sleep while idle (``--sleep-on-idle``). SGLang's prefill server
        would delay a handshake by up to a second, and its server with a store would sleep while the
        store answers."""
        ours = self.variant != "stock" and self.venv is None
        return ours or not (self.prefill or self.store)

    @property
    def servers(self) -> dict[str, int]:
        """Number of servers, by role."""
        return {"aggregated": self.aggregated, "prefill": self.prefill, "decode": self.decode}

    @property
    def shown(self) -> str:
        """The title, with the number of servers."""
        return self.title.replace(SERVERS, counted(self.servers))


def counted(servers: Mapping[str, int]) -> str:
    """Return ``2 aggregated``, ``1P 1D``, both, or that a router hides the servers."""
    aggregated = f"{servers['aggregated']} aggregated" if servers["aggregated"] else ""
    pair = f"{servers['prefill']}P {servers['decode']}D" if servers["decode"] else ""
    return ", ".join(filter(None, (aggregated, pair))) or "behind a router"


class Rig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Servers that are started on this machine for each arm: on its CPU, or each on GPUs of its
    own."""

    pool_tokens: int = 8800
    """KV pool of every server."""
    chunk_tokens: int = 512
    """Tokens of a prefill step."""
    reserve_tokens: int | None = None
    """``--num-reserved-decode-tokens``; None: one block, as SGLang's 512 are one of the trace."""
    shape: dict[str, int] = {}
    """Shape of the random model; see ``benchmark.harness.models.random_qwen3``."""
    gpus: int = 0
    """GPUs of this machine. Each server has the next ``ranks`` of them. 0: none of its own."""
    ranks: Positive = 1
    """Tensor parallel ranks of each server."""
    model: str | None = None
    """Folder or name of the model; None: a random one. The servers download
    nothing."""
    page_tokens: Positive | None = None
    """Page size; None: a block of the trace."""
    max_running: Positive = 64
    """``--max-running-requests``."""
    args: tuple[str, ...] = ()
    """Further arguments of all engines."""
    start_s: Above = 25.0
    """Assumed time to start an arm's servers; the time limit is ten times as long."""

    def check(self, arms: Mapping[str, Arm]) -> None:
        """Raise ``ValueError`` if the servers of an arm need more GPUs than there are."""
        if not self.gpus:
            if self.model or self.ranks > 1:
                raise ValueError("`rig`: `model` and `ranks` need `gpus`")
            return
        for name, arm in arms.items():
            need = sum(arm.servers.values()) * self.ranks
            if need > self.gpus:
                raise ValueError(
                    f"arm {name} ({arm.shown}) needs {need} GPUs, {self.ranks} for each server, "
                    f"and `rig` has {self.gpus}"
                )


class FleetFile(Roles, frozen=True):
    """The file. Roles at its top level are the setups ``aggregated``, ``pd`` and ``router``."""

    setups: dict[str, Setup] = {}
    """Further setups by name. An arm of a study with the name of a setup is measured on it."""
    rig: Rig | None = None
    """Starts servers, instead of addresses."""
    endpoint: Endpoint = "generate"
    model: str = "default"
    """Model name in requests to OpenAI's endpoints."""
    tokenizer: str = "builtin"
    """Tokenizer with which AIPerf makes prompts of a given length: a model's name, or its own."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' API key."""
    headers: dict[str, str] = {}
    vocabulary: tuple[int, int] = (1000, 30000)
    """Token ids that prompts are drawn from: first id, and last id plus one."""
    block_tokens: Positive = BLOCK_TOKENS
    """Tokens to send for a block of 512 tokens of the trace."""
    answers: Above | None = None
    """Share of the recorded answer length to request; None: scaled like the blocks."""
    max_answer_tokens: Positive | None = None
    """Longer answers are cut to this length."""
    pool_tokens: Positive | None = None
    """KV pool of a decoding server; on the rig, the rig's. Requests longer than half of it are left
    out, and counted."""
    slo: Slo | None = None
    """Replaces the study's."""
    flush: bool = True
    """Empty the servers' caches before each load (``/flush_cache``)."""
    warm_up: int = 4
    """Number of requests to each setup before its first load."""

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
        """Return all setups by name."""
        setups = dict(self.setups)
        if self.aggregated:
            setups["aggregated"] = Setup(aggregated=self.aggregated, store=self.store)
        if self.prefill and self.decode:
            setups["pd"] = Setup(prefill=self.prefill, decode=self.decode, store=self.store)
        if self.router:
            setups["router"] = Setup(router=self.router, store=self.store)
        return setups

    @property
    def all_headers(self) -> dict[str, str]:
        """Headers of a request, with the API key."""
        if not self.api_key_env:
            return self.headers
        return {**self.headers, "Authorization": f"Bearer {os.environ[self.api_key_env]}"}

    def public(self) -> dict[str, Any]:
        """Return the settings that may be published: no key, header or address."""
        sizes = ("endpoint", "model", "block_tokens", "answers", "max_answer_tokens", "flush")
        about: dict[str, Any] = {name: getattr(self, name) for name in sizes}
        about["pool_tokens"] = self.rig.pool_tokens if self.rig else self.pool_tokens
        about["rig"] = self.rig is not None
        if self.rig is not None and self.rig.gpus:
            # A folder's name alone, because its path belongs to this machine.
            name = self.rig.model or "random"
            about["model"] = Path(name).name if Path(name).is_absolute() else name
            about["gpus"] = self.rig.gpus
        return about


def load(path: Path, kind: type[T]) -> T:
    """Return a YAML file as a record.

    Raises:
        ValueError: the file is not valid; the message names file and key.
    """
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=kind)  # JSON is YAML too
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _url(text: str | None) -> None:
    if text is not None and urlsplit(text).scheme not in ("http", "https"):
        raise ValueError(f"{text!r} is not an http URL")

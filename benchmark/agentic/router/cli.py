"""Command line of the router: ``python -m benchmark.agentic route --help``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from pathlib import Path

from aiohttp import web

from benchmark.agentic.router.app import Router
from benchmark.agentic.router.policies import POLICIES, Knobs
from benchmark.agentic.router.settings import Settings

_BOUNDS = {
    "block_tokens": "tokens of a block of the shadow index",
    "pool_tokens": "KV pool of a worker that does not tell its own, tokens",
    "reserve_tokens": "answer tokens to keep room for at most, as --num-reserved-decode-tokens",
    "max_sessions": "sessions whose worker is remembered",
    "heavy_threshold": "uncached tokens above which a request is offloaded to a PD pair beside "
    "colocated workers",
    "offload_min_cached": "share of the prompt that the prefill worker must hold for that",
    "max_offload_inflight": "offloaded requests at once",
    "max_attempts": "workers, or pairs, that a request is tried on at most",
    "connect_timeout": "s",
    "request_timeout": "s, for a whole request",
    "max_body_bytes": "of a request",
    "health_path": "GET of it answers 200",
    "health_interval": "s between two checks of a worker",
    "health_timeout": "s that one may take",
    "health_fall": "failed checks, or refused connections, in a row that take a worker out",
    "health_rise": "good ones in a row that bring it back",
}
_WEIGHTS = {
    "alpha": "linear: ongoing tokens that a cached one outweighs",
    "overload_factor": "linear: load against the others' above which a session leaves its worker",
    "batch_weight": "delta_kv: price of a full batch, in prompts to move",
    "migrate_turns": "linear: requests after which a session leaves its worker; 0: never",
    "seed": "random",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmark.agentic route",
        description="Routes to colocated workers, or to prefill and decode workers, by policy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--host", default="127.0.0.1", help="to listen on")
    made.add_argument("--port", type=int, default=8000, help="to listen on")
    made.add_argument("--worker", action="append", default=[], metavar="URL", help="colocated")
    made.add_argument(
        "--prefill", action="append", default=[], nargs=2, metavar=("URL", "BOOTSTRAP_PORT")
    )
    made.add_argument("--decode", action="append", default=[], metavar="URL")
    for name, what in (("", "colocated"), ("prefill_", "prefill"), ("decode_", "decode")):
        _add(made, f"{name}policy", getattr(Settings, f"{name}policy"), f"for {what} workers")
    for name, text in _BOUNDS.items():
        _add(made, name, getattr(Settings, name), text)
    for name, text in _WEIGHTS.items():
        _add(made, name, getattr(Knobs, name), text)
    made.add_argument("--decisions", type=Path, metavar="FILE", help="log of JSON lines")
    made.add_argument("--log-level", default="INFO")
    return made


def _add(made: argparse.ArgumentParser, name: str, default: object, text: str) -> None:
    made.add_argument(
        "--" + name.replace("_", "-"),
        default=default,
        type=type(default),
        choices=POLICIES if name.endswith("policy") else None,
        help=text,
    )


def settings(args: argparse.Namespace) -> Settings:
    """Raises ``ValueError`` for workers that make no sense together."""
    given = vars(args)
    policies = ("policy", "prefill_policy", "decode_policy")
    return Settings(
        workers=tuple(args.worker),
        prefills=tuple((url, int(port)) for url, port in args.prefill),
        decodes=tuple(args.decode),
        knobs=Knobs(**{name: given[name] for name in _WEIGHTS}),
        **{name: given[name] for name in (*policies, *_BOUNDS)},
    )


def main(argv: list[str]) -> int:
    """Serves until interrupted."""
    made = parser()
    args = made.parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(name)s %(message)s")
    try:
        chosen = settings(args)
    except ValueError as error:
        made.error(str(error))
    # What is loaded by now stays; most of what a request makes goes without the collector.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    web.run_app(
        Router(chosen, args.decisions).app,
        host=args.host,
        port=args.port,
        loop=new_loop(),
        access_log=None,
        handler_cancellation=True,
        print=lambda text: logging.getLogger(__name__).info(text.splitlines()[0]),
    )
    return 0


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which SGLang brings, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop

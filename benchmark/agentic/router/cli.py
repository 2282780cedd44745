"""Command line of the router: ``python -m benchmark.agentic route --help``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from aiohttp import web

from benchmark.agentic.router.app import Router
from benchmark.agentic.router.policies import KNOBS, POLICIES, Knobs
from benchmark.agentic.router.settings import Settings


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
    for name, default, text in _options():
        made.add_argument(
            "--" + name.replace("_", "-"),
            default=default,
            type=type(default),
            choices=POLICIES if name.endswith("policy") else None,
            help=text,
        )
    made.add_argument("--decisions", type=Path, metavar="FILE", help="log of JSON lines")
    made.add_argument("--log-level", default="INFO")
    return made


def _options() -> Iterator[tuple[str, object, str]]:
    """Name, default and help of all that is not an address."""
    for each in fields(Settings):
        if "help" in each.metadata:
            yield each.name, each.default, each.metadata["help"]
    for name, text in KNOBS.items():
        yield name, getattr(Knobs, name), text


def settings(args: argparse.Namespace) -> Settings:
    """Raises ``ValueError`` for workers that make no sense together."""
    given = {name: getattr(args, name) for name, _, _ in _options()}
    knobs = Knobs(**{name: given.pop(name) for name in KNOBS})
    pairs = tuple((url, int(port)) for url, port in args.prefill)
    return Settings(tuple(args.worker), pairs, tuple(args.decode), knobs, **given)


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

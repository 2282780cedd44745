"""Command line of the router: ``python -m benchmark route --help``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmark.agentic.router.app import Router
from benchmark.agentic.router.policies import POLICIES, Knobs
from benchmark.agentic.router.settings import Settings


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmark route",
        description="Routes to aggregated workers, or to prefill and decode workers, by policy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--host", default="127.0.0.1", help="address to listen on")
    made.add_argument("--port", type=int, default=8000, help="port to listen on")
    made.add_argument("--worker", action="append", default=[], metavar="URL", help="aggregated")
    made.add_argument(
        "--prefill", action="append", default=[], nargs=2, metavar=("URL", "BOOTSTRAP_PORT")
    )
    made.add_argument("--decode", action="append", default=[], metavar="URL")
    for each in _options():
        made.add_argument(
            "--" + each.name.replace("_", "-"),
            default=each.default,
            type=type(each.default),
            choices=POLICIES if each.name.endswith("policy") else None,
            help=each.metadata["help"],
        )
    made.add_argument("--decisions", type=Path, metavar="FILE", help="file for a log of JSON lines")
    made.add_argument("--log-level", default="INFO")
    return made


def _options() -> Iterator[Field[Any]]:
    """All that is not an address."""
    return (each for each in (*fields(Settings), *fields(Knobs)) if "help" in each.metadata)


def settings(args: argparse.Namespace) -> Settings:
    """Raises ``ValueError`` for workers that make no sense together."""
    given = {each.name: getattr(args, each.name) for each in _options()}
    knobs = Knobs(**{each.name: given.pop(each.name) for each in fields(Knobs)})
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

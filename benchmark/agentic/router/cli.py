"""Command line of the router: ``python -m benchmark route --help``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from dataclasses import fields
from pathlib import Path

from aiohttp import web

from benchmark.agentic.router.policies import POLICIES
from benchmark.agentic.router.proxy import Router
from benchmark.agentic.router.schedule import Settings

OPTIONS = [option for option in fields(Settings) if "help" in option.metadata]
"""All settings that are not an address."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmark route",
        description="Routes to aggregated workers, or to prefill and decode workers, by policy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--worker", action="append", default=[], metavar="URL", help="aggregated")
    add("--prefill", action="append", default=[], nargs=2, metavar=("URL", "BOOTSTRAP_PORT"))
    add("--decode", action="append", default=[], metavar="URL")
    for option in OPTIONS:
        add(
            "--" + option.name.replace("_", "-"),
            default=option.default,
            type=type(option.default),
            choices=POLICIES if option.name.endswith("policy") else None,
            help=option.metadata["help"],
        )
    add("--decisions", type=Path, metavar="FILE", help="file for a log of JSON lines")
    add("--log-level", default="INFO")
    return made


def settings(args: argparse.Namespace) -> Settings:
    """Return the settings. Raises ``ValueError`` for an invalid combination of workers."""
    options = {option.name: getattr(args, option.name) for option in OPTIONS}
    pairs = tuple((url, int(port)) for url, port in args.prefill)
    return Settings(
        workers=tuple(args.worker), prefills=pairs, decodes=tuple(args.decode), **options
    )


def main(argv: list[str]) -> int:
    """Serve until interrupted."""
    made = parser()
    args = made.parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(name)s %(message)s")
    try:
        chosen = settings(args)
    except ValueError as error:
        made.error(str(error))
    try:  # a dependency of SGLang
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    # Objects loaded so far stay alive; most objects of a request are freed by reference counts.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    web.run_app(
        Router(chosen, args.decisions).app,
        host=args.host,
        port=args.port,
        loop=new_event_loop(),
        access_log=None,
        handler_cancellation=True,
        print=lambda text: logging.getLogger(__name__).info(text.splitlines()[0]),
    )
    return 0

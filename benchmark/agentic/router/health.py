"""Which workers take part: each is asked at intervals, apart from the others."""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

import aiohttp

from benchmark.agentic.router.settings import Settings
from benchmark.agentic.router.state import Worker

logger = logging.getLogger(__name__)

UPSTREAM_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
"""What a worker that is not there, or goes away, raises."""


async def watch(worker: Worker, session: aiohttp.ClientSession, settings: Settings) -> None:
    """Checks one worker for ever."""
    while True:
        await check(worker, session, settings)
        await asyncio.sleep(settings.health_interval)


async def check(worker: Worker, session: aiohttp.ClientSession, settings: Settings) -> None:
    """Checks it once, and asks a worker that comes back for the size of its pool."""
    timeout = aiohttp.ClientTimeout(total=settings.health_timeout)
    try:
        async with session.get(worker.url + "/health", timeout=timeout) as answer:
            await answer.read()
            if answer.status != 200:
                failed(worker, f"/health answered {answer.status}")
                return
        if not worker.up and (tokens := await _pool_tokens(worker, session, timeout)):
            worker.set_pool(tokens)
    except UPSTREAM_ERRORS as error:
        gone = isinstance(error, aiohttp.ClientConnectorError)
        failed(worker, reason(error), gone=gone)
        return
    if worker.check_passed():
        logger.info(
            "%s worker %s is up, pool %d tokens", worker.role, worker.url, worker.pool_tokens
        )


def failed(worker: Worker, why: str, *, gone: bool = False) -> None:
    """A check, or a request's connection, failed."""
    if worker.check_failed(gone=gone):
        logger.warning("%s worker %s gets no more requests: %s", worker.role, worker.url, why)


async def reach(url: str, timeout: float) -> None:
    """Raises ``UPSTREAM_ERRORS`` where nobody takes a connection within ``timeout`` seconds."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connecting = asyncio.open_connection(parts.hostname, port)
    _, writer = await asyncio.wait_for(connecting, timeout)
    writer.close()


def reason(error: BaseException) -> str:
    """What went wrong, for a client: some errors have no text of their own, or too much."""
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer was cut short"
    if isinstance(error, asyncio.TimeoutError):
        return f"timed out {error}".rstrip()
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def _pool_tokens(
    worker: Worker, session: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout
) -> int | None:
    """What SGLang says of its KV pool; None where a worker does not say."""
    async with session.get(worker.url + "/server_info", timeout=timeout) as answer:
        if answer.status != 200:
            return None
        try:
            tokens = (await answer.json(content_type=None)).get("max_total_num_tokens")
        except (ValueError, AttributeError):
            return None
    return tokens if isinstance(tokens, int) and tokens > 0 else None

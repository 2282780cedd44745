"""SGLang's ``file`` backend for the stage, with calls that a test can hold or refuse.

A server loads it as ``--hicache-storage-backend dynamic``; the test steers it by files in a folder
(``Gates``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.buffer_only.storage_backends import FileParts
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.patchset.combine import combine

METHODS = ("batch_exists", "batch_get_v1", "batch_set_v1")
_Base: Any = combine(HiCacheFile, FileParts)


class SteeredFile(_Base):
    """Checks its gates before each call."""

    def __init__(self, storage_config: Any, _: Any) -> None:
        super().__init__(storage_config)
        self._gates = Path(storage_config.extra_config["gates"])

    def batch_exists(self, *args: Any, **kwargs: Any) -> Any:
        self._pass("batch_exists")
        return super().batch_exists(*args, **kwargs)

    def batch_get_v1(self, *args: Any, **kwargs: Any) -> Any:
        self._pass("batch_get_v1")
        return super().batch_get_v1(*args, **kwargs)

    def batch_set_v1(self, keys: list[str], *args: Any, **kwargs: Any) -> Any:
        self._pass("batch_set_v1")
        if (self._gates / "refuse").exists():
            return [False] * len(keys)
        return super().batch_set_v1(keys, *args, **kwargs)

    def _pass(self, method: str) -> None:
        gate = self._gates / f"hold {method}"
        while gate.exists():
            (self._gates / f"held {method}").touch()
            time.sleep(0.01)


class Gates:
    """The test's control of a ``SteeredFile`` in a server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def refuse(self) -> Iterator[None]:
        """Make writes report that no page was stored, without an error."""
        with self._closed("refuse"):
            yield

    @contextmanager
    def hold(self, method: str) -> Iterator[None]:
        """Hold every call of ``method`` before it accesses memory."""
        (self._folder / f"held {method}").unlink(missing_ok=True)
        with self._closed(f"hold {method}"):
            yield

    def wait_held(self, method: str) -> None:
        """Wait until a call is held."""
        deadline = time.monotonic() + 30.0
        while not (self._folder / f"held {method}").exists():
            assert time.monotonic() < deadline, f"{method} was not called"
            time.sleep(0.01)

    @contextmanager
    def _closed(self, name: str) -> Iterator[None]:
        gate = self._folder / name
        gate.touch()
        try:
            yield
        finally:
            gate.unlink()

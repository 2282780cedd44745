"""Loaded at the first look for SGLang.

``sglang_disagg_patchset.pth`` puts a finder of a few lines on ``sys.meta_path`` of every
interpreter of the environment. Where it is asked for ``sglang``, it imports this module and
passes the question on. So an interpreter that never imports SGLang pays a fifth of a millisecond,
also where byte code cannot be cached. This module puts its own finder in front and does nothing
else. What that one does:

* ``sglang``: lets our sources be found beside SGLang's own, where either is an editable install;
* ``sglang.srt.*``: hands modules of the replacement table to ``sglang.srt.patchset.attach``.

Rules that keep it harmless: it only uses what the interpreter has loaded anyway, it asks the other
finders for every spec (so that it can stand beside any other import hook), and whatever goes wrong
costs one line on stderr, never the interpreter.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False  # as typing's, without importing it
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any  # Any: finders of import, and what they give

    from sglang.srt.patchset.attach import Attachment

    _Path = Sequence[str] | None


def _say(message: str) -> None:
    sys.stderr.write(f"sglang-disagg-patchset: {message}\n")


def _own_folders() -> Iterator[str]:
    """Folders named ``sglang`` on the path that hold our sources (one, unless installed twice)."""
    for entry in [entry for entry in sys.path if isinstance(entry, str)]:
        folder = os.path.join(entry, "sglang")
        if os.path.isfile(os.path.join(folder, "srt", "patchset", "__init__.py")):
            yield folder


class Finder:
    """The one meta path finder. Holds no table: that is loaded with SGLang."""

    def __init__(self) -> None:
        self._busy: set[tuple[int, str]] = set()
        self._attachment: Attachment | None = None
        self._broken = False

    def find_spec(
        self, name: str, path: _Path = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for ``sglang`` and for modules of the table."""
        work: Callable[[str, _Path, ModuleType | None], ModuleSpec | None]
        if name == "sglang":
            work = self._find_sglang
        # Loading the table must not ask the table.
        elif name.startswith("sglang.srt.") and not f"{name}.".startswith("sglang.srt.patchset."):
            work = self._find_target
        else:
            return None
        # Another hook may ask us back while we ask it: the second question is not ours to answer.
        key = (get_ident(), name)
        if key in self._busy:
            return None
        self._busy.add(key)
        try:
            return work(name, path, target)
        finally:
            self._busy.discard(key)

    def _find_sglang(self, name: str, path: _Path, target: ModuleType | None) -> ModuleSpec | None:
        if sys.meta_path[0] is not self:
            # Whoever came later may answer for a table module without asking us: be asked first.
            sys.meta_path[:] = [self] + [f for f in sys.meta_path if f is not self]
        spec = self._ask(list(sys.meta_path), name, path, target)
        if spec is not None and spec.submodule_search_locations is not None:
            known = {os.path.realpath(p) for p in spec.submodule_search_locations}
            for folder in _own_folders():
                if os.path.realpath(folder) not in known:
                    spec.submodule_search_locations.append(folder)
        return spec

    def _find_target(self, name: str, path: _Path, target: ModuleType | None) -> ModuleSpec | None:
        if self._attachment is None and not self._broken:
            try:
                from sglang.srt.patchset.attach import activate

                self._attachment = activate()
            except Exception as error:
                self._broken = True
                _say(f"inert: the replacement table did not load: {error!r}")
        if self._attachment is None or not self._attachment.has_rows(name):
            return None
        finders = list(sys.meta_path)
        behind = finders.index(self) + 1 if self in finders else 0
        spec = self._ask(finders[behind:], name, path, target)
        if spec is not None:
            self._attachment.watch(spec)
        return spec

    def _ask(
        self, finders: list[Any], name: str, path: _Path, target: ModuleType | None
    ) -> ModuleSpec | None:
        folder: ModuleSpec | None = None
        for finder in finders:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: ModuleSpec | None = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    return spec
                # Only folders without an __init__.py: where SGLang is an editable installation (as
                # in its own images), ours lies on the path, and a finder behind has the package.
                folder = folder or spec
        return folder


def install() -> None:
    """Put the finder on the meta path, once for an interpreter."""
    if not any(type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.insert(0, Finder())


install()

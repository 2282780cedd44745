"""Import hook, loaded at the first import of SGLang.

``sglang_disagg_patchset.pth`` puts a finder of a few lines on ``sys.meta_path`` of every
interpreter of the environment. When queried for ``sglang``, it imports this module and forwards the
query. So an interpreter that never imports SGLang pays a fifth of a millisecond, even if byte code
cannot be cached. This module only puts its own finder in front, which handles

* ``sglang``: adds our sources to SGLang's package path, if either is an editable install;
* ``sglang.srt.*``: passes modules of the replacement table to ``sglang.srt.patchset.attach``.

To be harmless, it uses only modules that the interpreter has loaded anyway, gets every spec from
the other finders (so that it works beside any import hook), and turns every error into one line on
stderr.

Contract: any thread may import. ``_busy`` keys recursion by thread; Python's import locks order the
rest.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False  # replaces typing's, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any  # Any: import finders and their results

    from sglang.srt.patchset.attach import Attachment

    _Path = Sequence[str] | None


def _say(message: str) -> None:
    sys.stderr.write(f"sglang-disagg-patchset: {message}\n")


def _own_folders() -> Iterator[str]:
    """Yield the ``sglang`` folders on the path with our sources (one, unless installed twice)."""
    for entry in [entry for entry in sys.path if isinstance(entry, str)]:
        folder = os.path.join(entry, "sglang")
        if os.path.isfile(os.path.join(folder, "srt", "patchset", "__init__.py")):
            yield folder


class Finder:
    """The meta path finder. Holds no table, because the table is loaded with SGLang."""

    def __init__(self) -> None:
        self._busy: set[tuple[int, str]] = set()
        self._attachment: Attachment | None = None
        self._broken = False

    def find_spec(
        self, name: str, path: _Path = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ``sglang`` and modules of the table; None for others."""
        work: Callable[[str, _Path, ModuleType | None], ModuleSpec | None]
        if name == "sglang":
            work = self._find_sglang
        # Not for the table's own modules, because loading the table would query the table.
        elif name.startswith("sglang.srt.") and not f"{name}.".startswith("sglang.srt.patchset."):
            work = self._find_target
        else:
            return None
        # Return None on recursion, because another hook may query this one while it is queried.
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
            # Move to the front, because a finder added later could return a table module first.
            sys.meta_path[:] = [self] + [f for f in sys.meta_path if f is not self]
        spec = self._query(list(sys.meta_path), name, path, target)
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
        spec = self._query(finders[behind:], name, path, target)
        if spec is not None:
            self._attachment.watch(spec)
        return spec

    def _query(
        self, finders: list[Any], name: str, path: _Path, target: ModuleType | None
    ) -> ModuleSpec | None:
        folder: ModuleSpec | None = None
        for finder in finders:
            if finder is not self and hasattr(finder, "find_spec"):
                spec: ModuleSpec | None = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    return spec
                # A namespace package (no __init__.py). Remember it and go on, because with an
                # editable SGLang (as in its own images) our folder is found on the path first, and
                # a later finder has the package.
                folder = folder or spec
        return folder


def install() -> None:
    """Put the finder on the meta path, once per interpreter."""
    if not any(type(f).__module__ == __name__ for f in sys.meta_path):
        sys.meta_path.insert(0, Finder())


install()

"""The import hook: which modules the stand-in provides, and which it edits after they ran."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from .names import NamesLoader

#: Module of SGLang, torch or NIXL -> file of this package whose ``edit(module)`` runs after it.
EDITS = {
    "torch": "cuda",
    "nixl._api": "nixl",
    "nixl_cu12._api": "nixl",
    "nixl_cu13._api": "nixl",
    "sglang.srt.mem_cache.allocator": "allocator",
    "sglang.srt.mem_cache.memory_pool_host": "host_pool",
}

#: Modules made of names only. ``sgl_kernel`` is shadowed where it is installed, since it cannot
#: be imported without libcuda; ``vllm._custom_ops`` is imported, and never called, for the rotary
#: and norm layers of a CPU without AMX. Other submodules of ``vllm`` stay missing: SGLang takes
#: their absence into account.
NAMES_ONLY = ("sgl_kernel", "vllm", "vllm._custom_ops")

#: The one module of kernels that has to work: the copies of HiCache's ``direct`` I/O backend.
KVCACHEIO = "sgl_kernel.kvcacheio"


def load_edit(module: ModuleType, file: str) -> None:
    """Run the edit in ``file`` of this package on ``module``."""
    importlib.import_module(f".{file}", __package__).edit(module)


class StandinFinder(MetaPathFinder):
    """Answers for the provided modules, and passes the edited ones on with one step added.

    A spec for an edited module comes from the finders behind this one, so that another finder
    of the same kind, in front or behind, has its own edit of the same module applied as well.
    """

    is_cpu_standin = True

    def __init__(self) -> None:
        self._asking = threading.local()
        for name, file in EDITS.items():
            if name in sys.modules:
                load_edit(sys.modules[name], file)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == KVCACHEIO:
            return spec_from_file_location(KVCACHEIO, Path(__file__).with_name("kvcacheio.py"))
        if fullname in NAMES_ONLY or fullname.startswith("sgl_kernel."):
            return ModuleSpec(fullname, NamesLoader(), is_package=True)
        if fullname in EDITS:
            spec = self._ask_the_others(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, EDITS[fullname])
            return spec
        return None

    def _ask_the_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        asking: set[str] = self._asking.__dict__.setdefault("names", set())
        if fullname in asking:
            # A finder behind us asks all the others in its turn; without this we would ask each
            # other for ever.
            return None
        asking.add(fullname)
        try:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(fullname, path, target) if find else None
                if spec is not None:
                    return spec
        finally:
            asking.discard(fullname)
        return None


def _run_after(loader: Loader, file: str) -> None:
    """Have ``loader`` run our edit once it has executed a module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        load_edit(module, file)

    # On the instance, and not in a loader of our own: tools that look at the loader's type
    # (resources, inspect, zipimport) keep seeing the real one.
    loader.exec_module = exec_module  # type: ignore[method-assign]

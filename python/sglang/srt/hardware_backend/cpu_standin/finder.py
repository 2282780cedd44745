"""The import hook: which modules the stand-in provides, and which it edits after they ran."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from .names import NamesLoader

Edit = Callable[[ModuleType], None]

#: Module of SGLang, torch or NIXL -> files of this package whose ``edit(module)`` runs after it.
EDIT_FILES = {
    "torch": ("cuda", "eager"),
    "nixl._api": ("nixl",),
    "nixl_cu12._api": ("nixl",),
    "nixl_cu13._api": ("nixl",),
    "sglang.srt.constrained.llguidance_backend": ("grammar",),
    "sglang.srt.constrained.xgrammar_backend": ("grammar",),
    "sglang.srt.distributed.parallel_state": ("dp_attention",),
    "sglang.srt.entrypoints.engine": ("start_method",),
    "sglang.srt.layers.attention.torch_native_backend": ("dp_attention", "draft_attention"),
    "sglang.srt.layers.dp_attention": ("dp_attention",),
    "sglang.srt.lora.backend.torch_backend": ("lora",),
    "sglang.srt.mem_cache.allocator": ("allocator",),
    "sglang.srt.mem_cache.memory_pool": ("speculative",),
    "sglang.srt.mem_cache.memory_pool_host": ("host_pool",),
    "sglang.srt.model_executor.forward_batch_info": ("dp_attention",),
    "sglang.srt.model_executor.model_runner": ("replicas",),
    "sglang.srt.speculative.draft_utils": ("draft_attention",),
    "sglang.srt.speculative.eagle_info_v2": ("speculative",),
    "sglang.srt.speculative.eagle_utils": ("speculative",),
    "sglang.srt.speculative.spec_utils": ("speculative",),
}

#: Where SGLang 0.5.23 has what speculation needs.
ADDED_ON_0_5_23 = dict.fromkeys(
    (
        "sglang.kernels.ops.kvcache.cache_move",
        "sglang.kernels.ops.speculative.cache_locs",
        "sglang.kernels.ops.speculative.eagle",
        "sglang.kernels.ops.speculative.gather_spec_extras",
        "sglang.kernels.ops.speculative.spec_tree",
        "sglang.srt.arg_groups.speculative_hook",
        "sglang.srt.mem_cache.allocation",
    ),
    ("speculative",),
) | {"sglang.srt.layers.attention.torch_native_backend": ("draft_attention",)}

#: That release has CPU forms of the rest: of ``EDIT_FILES`` it needs these.
EDITED_ON_0_5_23 = (
    *("torch", "nixl.", "nixl_cu12.", "nixl_cu13.", "sglang.srt.entrypoints.engine"),
    "sglang.srt.speculative.draft_utils",
)

#: Packages made of names only, all submodules included. ``sgl_kernel`` is shadowed where it is
#: installed, since it cannot be imported without libcuda. ``flashinfer`` could be imported; on a
#: CPU nothing of it is ever called, and it is a quarter of a process's start-up.
NAMES_ONLY_PACKAGES = ("sgl_kernel", "flashinfer")

#: Modules made of names only. ``vllm._custom_ops`` is imported, and never called, for the rotary
#: and norm layers of a CPU without AMX. Other submodules of ``vllm`` stay missing: SGLang takes
#: their absence into account.
NAMES_ONLY = ("vllm", "vllm._custom_ops")

#: The one module of kernels that has to work: the copies of HiCache's ``direct`` I/O backend.
KVCACHEIO = "sgl_kernel.kvcacheio"


def _run_files(files: Sequence[str], module: ModuleType) -> None:
    for file in files:
        importlib.import_module(f".{file}", __package__).edit(module)


def default_edits(release: str) -> dict[str, Edit]:
    """``EDIT_FILES`` for this ``release`` of SGLang, as functions; a file is imported when its
    first module is."""
    files = EDIT_FILES
    if release == "0.5.23":
        files = {name: files[name] for name in files if name.startswith(EDITED_ON_0_5_23)}
        files |= ADDED_ON_0_5_23
    return {name: partial(_run_files, each) for name, each in files.items()}


class StandinFinder(MetaPathFinder):
    """Answers for the provided modules, and passes the edited ones on with one step added.

    A spec for an edited module comes from the finders behind this one, so that another finder
    of the same kind, in front or behind, has its own edit of the same module applied as well.
    Modules that are already imported are edited at once.
    """

    is_cpu_standin = True

    def __init__(self, edits: Mapping[str, Edit] | None = None) -> None:
        self._edits = default_edits(_installed_release()) if edits is None else edits
        self._asking = threading.local()
        for name, edit in self._edits.items():
            if name in sys.modules:
                edit(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a provided or edited module; None for all others."""
        if fullname == KVCACHEIO:
            return spec_from_file_location(KVCACHEIO, Path(__file__).with_name("kvcacheio.py"))
        if fullname in NAMES_ONLY or fullname.partition(".")[0] in NAMES_ONLY_PACKAGES:
            return ModuleSpec(fullname, NamesLoader(), is_package=True)
        if fullname in self._edits:
            spec = self._ask_those_behind(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _run_after(spec.loader, self._edits[fullname])
            return spec
        return None

    def _ask_those_behind(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        asking: set[str] = self._asking.__dict__.setdefault("names", set())
        if fullname in asking:
            # A finder behind us asks all the others in its turn; without this the two would ask
            # each other for ever.
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


def _installed_release() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def _run_after(loader: Loader, edit: Edit) -> None:
    """Have ``loader`` run ``edit`` once it has executed a module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        edit(module)

    # On the instance, and not in a loader of our own: tools that look at the loader's type
    # (resources, inspect, zipimport) keep seeing the real one.
    loader.exec_module = exec_module  # type: ignore[method-assign]

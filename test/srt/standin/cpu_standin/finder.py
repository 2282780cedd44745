"""The import hook: which modules the stand-in provides, and which it edits after they ran.

Kernels that a CPU never calls are provided by name: SGLang imports them all the same.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any, NoReturn  # Any: arguments of kernels that are not there

Edit = Callable[[ModuleType], None]
_HERE = os.path.dirname(__file__)

#: Module of SGLang, torch or NIXL -> "file:function" of this package, called with it after it ran.
EDITS = {
    "torch": ("edits:torch_without_cuda",),
    "nixl._api": ("edits:nixl_in_host_memory",),
    "nixl_cu12._api": ("edits:nixl_in_host_memory",),
    "nixl_cu13._api": ("edits:nixl_in_host_memory",),
    "sglang.srt.constrained.llguidance_backend": ("edits:mask_of_each_batch",),
    "sglang.srt.constrained.xgrammar_backend": ("edits:mask_by_xgrammar",),
    "sglang.srt.distributed.parallel_state": ("edits:exchange_by_gloo",),
    "sglang.srt.entrypoints.engine": ("edits:fork_processes",),
    "sglang.srt.layers.attention.attention_registry": ("attention:instead_of_triton",),
    "sglang.srt.layers.attention.fla.fused_norm_gate": ("norms:gated",),
    "sglang.srt.layers.attention.linear.gdn_backend": ("recurrent:edit",),
    "sglang.srt.layers.attention.mamba.mamba": ("mamba2:edit",),
    "sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated": ("norms:of_mamba2",),
    "sglang.srt.layers.attention.nsa.nsa_indexer": ("sparse_index:edit",),
    "sglang.srt.layers.attention.torch_native_backend": ("edits:pad_batches", "attention:edit"),
    "sglang.srt.layers.dp_attention": ("edits:copy_rows_in_torch",),
    "sglang.srt.layers.moe.fused_moe_native": ("experts:edit",),
    "sglang.srt.layers.moe.token_dispatcher.standard": ("experts:map_on_cpu",),
    "sglang.srt.lora.backend.torch_backend": ("edits:without_pinning_of_adapters",),
    "sglang.srt.mem_cache.allocator": ("allocator:edit",),
    "sglang.srt.mem_cache.memory_pool": ("speculative:edit",),
    "sglang.srt.mem_cache.memory_pool_host": ("edits:without_pinning_of_host_pools",),
    "sglang.srt.model_executor.forward_batch_info": ("edits:without_pinning",),
    "sglang.srt.model_executor.model_runner": ("edits:replicate_heads",),
    "sglang.srt.models.deepseek_common.attention_backend_handler": ("attention:absorb_latents",),
    "sglang.srt.models.minimax_m2": ("norms:minimax",),
    "sglang.srt.server_args": ("sparse_index:without_device",),
    "sglang.srt.speculative.draft_utils": ("speculative:draft_backends",),
    "sglang.srt.speculative.eagle_info_v2": ("speculative:edit",),
    "sglang.srt.speculative.eagle_utils": ("speculative:edit",),
    "sglang.srt.speculative.spec_utils": ("speculative:edit",),
    "sglang.srt.utils.common": ("attention:without_triton",),
}

#: The modules that are edited on SGLang 0.5.23 alone, most of them for speculation.
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
    ("speculative:edit",),
) | {
    "sglang.srt.disaggregation.mooncake.conn": ("edits:page_numbers_without_event",),
    "sglang.srt.lora.layers": ("edits:without_pinning_of_adapters",),
    "sglang.srt.mem_cache.pool_host.common": ("edits:without_registering_of_host_pools",),
    "sglang.srt.mem_cache.pool_host.mha": ("edits:copy_pages_in_torch",),
    "sglang.srt.arg_groups.model_hook": ("sparse_index:without_device_later",),
    "sglang.srt.layers.attention.dsa.dsa_indexer": ("sparse_index:edit",),
}

#: The modules of ``EDITS`` (prefixes of names) that are edited on that release too.
EDITED_ON_0_5_23 = (
    *("torch", "nixl.", "nixl_cu12.", "nixl_cu13.", "sglang.srt.entrypoints.engine"),
    *("sglang.srt.distributed.parallel_state", "sglang.srt.layers.attention.torch_native_backend"),
    *("sglang.srt.layers.dp_attention", "sglang.srt.model_executor.forward_batch_info"),
    "sglang.srt.lora.backend.torch_backend",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.layers.attention.mamba.",
    "sglang.srt.layers.moe.",
    "sglang.srt.models.deepseek_common.attention_backend_handler",
    "sglang.srt.models.minimax_m2",
    "sglang.srt.speculative.draft_utils",
    "sglang.srt.utils.common",
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


@dataclass(frozen=True)
class MissingKernel:
    """Stands for one kernel, or for a table of them; to call it is an error that names it."""

    _name: str

    def __getattr__(self, attribute: str) -> MissingKernel:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return MissingKernel(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self._name} has no CPU form in the stand-in; see the flags in "
            "docs/advanced_features/cpu_standin.md"
        )


class NamesModule(ModuleType):
    """A module each of whose public names is a ``MissingKernel``."""

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):  # what the import system and inspect look for is really absent
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class NamesLoader(Loader):
    """Makes a ``NamesModule`` of any spec."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return NamesModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def edits_of(release: str) -> dict[str, tuple[str, ...]]:
    """What is edited in this ``release`` of SGLang."""
    if release != "0.5.23":
        return EDITS
    kept = {name: edits for name, edits in EDITS.items() if name.startswith(EDITED_ON_0_5_23)}
    return kept | ADDED_ON_0_5_23


@functools.cache
def installed_release() -> str:
    """The release of SGLang; empty if there is none."""
    from importlib import metadata  # which every Python process on the path would pay for

    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def run_edits(module: ModuleType) -> None:
    """Run what the release needs for ``module``: "file:function" of this package. A file is
    imported when its first module is."""
    for each in edits_of(installed_release()).get(module.__name__, ()):
        file, _, function = each.partition(":")
        getattr(importlib.import_module(f".{file}", __package__), function)(module)


class StandinFinder(MetaPathFinder):
    """Answers for the provided modules, and passes the edited ones on with one step added.

    A spec for an edited module comes from the finders behind this one, so that another finder
    of the same kind, in front or behind, has its own edit of the same module applied as well.
    Modules that are already imported are edited at once.
    """

    def __init__(self, edits: Mapping[str, Edit] | None = None) -> None:
        if edits is None:
            edits = dict.fromkeys((*EDITS, *ADDED_ON_0_5_23), run_edits)
        self._edits = edits
        self._asking = threading.local()
        for name, edit in self._edits.items():
            if sys.modules.get(name) is not None:
                edit(sys.modules[name])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a provided or edited module; None for all others."""
        if fullname == KVCACHEIO:
            return spec_from_file_location(KVCACHEIO, os.path.join(_HERE, "kvcacheio.py"))
        if fullname in NAMES_ONLY or fullname.partition(".")[0] in NAMES_ONLY_PACKAGES:
            return ModuleSpec(fullname, NamesLoader(), is_package=True)
        if fullname in self._edits:
            spec = self._ask_those_behind(fullname, path, target)
            if spec is not None and spec.loader is not None:
                execute, edit = spec.loader.exec_module, self._edits[fullname]

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    edit(module)

                # On the instance, and not in a loader of our own: tools that look at the loader's
                # type (resources, inspect, zipimport) keep seeing the real one.
                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
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

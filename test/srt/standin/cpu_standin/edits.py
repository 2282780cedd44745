"""What takes a few lines: processes, torch and grammar libraries without CUDA; ordinary memory
where SGLang expects a device, or memory that CUDA page-locks; and several ranks without a GPU.

With ``--enable-dp-attention`` batches are padded and rows are exchanged between ranks. SGLang
registers the exchange for GPUs only, and copies rows with a Triton kernel. gloo and torch do the
same.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any  # Any: modules that are edited, and their objects

from . import StandinRefused


class Instead:
    """A module, except for the names that are given."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# ---- processes, torch, grammars ----


def torch_without_cuda(torch: Any) -> None:
    """Refuse where torch sees a device; else make waiting for the device a no-op, events those of
    the CPU, and ``torch.compile`` return what it is given.

    SGLang synchronizes around the CPU copy of a retracted request's KV on every device, says which
    streams use a tensor where speculation overlaps with scheduling, and (0.5.23) records an event
    before prefill sends a cached prefix. It decorates a few small functions with
    ``torch.compile``: on a CPU that would cost more than it gives. Each process imports inductor at
    start (over a third of its start-up), and the first request waits for a C++ compiler, which a
    fresh machine need not have.
    """
    if torch.cuda.is_available():
        raise StandinRefused("torch sees a CUDA device")

    def nothing(*args: object, **options: object) -> None:
        """There is no device to wait for, and one stream only."""

    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        """Both forms: ``compile(f)`` and ``@compile(...)``."""
        return model if model is not None else lambda function: function

    torch.cuda.synchronize, torch.Tensor.record_stream, torch.compile = nothing, nothing, compile
    torch.cuda.Event = torch.cpu.Event


def fork_processes(engine: Any) -> None:
    """Have ``entrypoints.engine`` fork SGLang's processes.

    SGLang spawns its scheduler and detokenizer, and each imports everything again: on a CPU that is
    nearly all of a server's start. Forked from the launcher, they have it all in memory. This is
    safe because no CUDA context and no OpenMP pool exist at that time. Data parallel schedulers are
    spawned as on a GPU, because their controller starts each from a thread of its own.
    """
    prepare = engine._set_envs_and_config

    def prepare_and_fork(server_args: Any) -> None:
        prepare(server_args)
        if server_args.dp_size == 1 or server_args.enable_dp_attention:
            engine.mp.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_and_fork


def mask_by_xgrammar(module: Any) -> None:
    """Mask logits with xgrammar's own CPU kernel."""

    def mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, vocab_mask)

    module.XGrammarGrammar.apply_vocab_mask = staticmethod(mask_on_cpu)


def mask_of_each_batch(module: Any) -> None:
    """Have llguidance allocate a mask for each batch.

    SGLang 0.5.10 keeps the mask of the batch before and clears none of its rows, so that a request
    without a grammar is held to the tokens of an earlier one in its row.
    """
    grammar = module.GuidanceGrammar
    allocate = grammar.allocate_vocab_mask
    grammar.allocate_vocab_mask = lambda self, *args, **kwargs: allocate(
        SimpleNamespace(bitmask=None, llguidance_tokenizer=self.llguidance_tokenizer),
        *args,
        **kwargs,
    )


# ---- memory ----


def without_pinning(module: Any) -> None:
    """Have ``torch.tensor`` and ``torch.zeros`` of ``module`` ignore ``pin_memory``."""
    torch = module.torch

    def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **options: function(*args, **options)

    module.torch = Instead(torch, tensor=unpinned(torch.tensor), zeros=unpinned(torch.zeros))


def page_numbers_without_event(module: Any) -> None:
    """Have SGLang 0.5.23 pass page numbers to Mooncake's workers as it does to NIXL's, and not in
    pinned memory with an event of CUDA."""
    module.MooncakeKVSender.supports_host_tensor_indices = False


def without_pinning_of_adapters(module: Any) -> None:
    """Have the lengths and ranks of a LoRA batch's segments made in ordinary memory."""
    module.torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    without_pinning(module)


def without_pinning_of_host_pools(module: Any) -> None:
    """Construct every host pool of HiCache with ``pin_memory=False``, whatever the caller asks for:
    of no use to a CPU."""
    # The two bases that keep the argument; MHA, MLA and NSA pools reach the first.
    for base in (module.HostKVCache, module.MambaPoolHost):
        base.__init__ = _never_pinned(base.__init__)


def without_registering_of_host_pools(module: Any) -> None:
    """Construct the host pools of SGLang 0.5.23 in ordinary memory."""
    module._cuda_host_register = lambda buffer, granularity: None


def copy_pages_in_torch(module: Any) -> None:
    """Copy KV between the host pool and the pool of tokens, which SGLang 0.5.23 does on GPUs."""
    for name, value in vars(importlib.import_module("sgl_kernel.kvcacheio")).items():
        if name.startswith("transfer_kv"):
            setattr(module, name, value)


def _never_pinned(construct: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(construct)
    if "pin_memory" not in signature.parameters:
        raise ImportError(f"{construct.__qualname__} takes no pin_memory: another SGLang release?")

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["pin_memory"] = False
        construct(*bound.args, **bound.kwargs)

    return init


def nixl_in_host_memory(module: Any) -> None:
    """Have each new ``nixl_agent`` read ``VRAM`` as ``DRAM``.

    SGLang registers and describes its KV pools as ``VRAM``. NIXL's Python agent looks such names up
    in a table of its own, so this covers every call, present and future, without wrapping any.
    """
    agent = module.nixl_agent
    construct = agent.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        host = self.nixl_mems["DRAM"]
        self.nixl_mems = {**self.nixl_mems, "VRAM": host, "cuda": host}

    agent.__init__ = init


# ---- several ranks ----


def replicate_heads(model_runner: Any) -> None:
    """More ranks than KV heads: replicas of a head, as on GPUs. For a CPU, SGLang pads the heads
    instead, and only its AMX weight loader can fill the padding: pad only where GPUs could not lay
    out the heads either."""
    pad = model_runner.adjust_config_with_unaligned_cpu_tp

    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads, kv_heads = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
        if heads % tp_size == 0 and tp_size % kv_heads == 0:
            return model_config
        return pad(model_config, load_config, tp_size)

    model_runner.adjust_config_with_unaligned_cpu_tp = adjust


def pad_batches(module: Any) -> None:
    """A sequence of one token is the shortest that attention can be computed for."""
    module.TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda backend: 1


def copy_rows_in_torch(module: Any) -> None:
    module.memcpy_triton = module.memcpy_func = copy_rows  # the latter on SGLang 0.5.23


def exchange_by_gloo(module: Any) -> None:
    groups = module._groups

    def gather(output: Any, input: Any, group_name: str) -> None:
        groups[group_name]()._all_gather_into_tensor(output, input)

    def reduce_scatter(output: Any, input: Any, group_name: str) -> None:
        group = groups[group_name]()  # gloo has no reduce_scatter
        whole = group.all_reduce(input.clone())
        output.copy_(whole.tensor_split(group.world_size)[group.rank_in_group])

    def exchange(output: Any, input: Any, group_name: str) -> None:  # SGLang 0.5.23
        groups[group_name]()._all_to_all_single(output, input)

    module.reg_all_gather_into_tensor = gather
    module.reg_all_to_all_single = exchange
    module.reg_reduce_scatter_tensor = reduce_scatter
    if hasattr(coordinator := module.GroupCoordinator, "_deterministic_reduce_scatterv"):
        coordinator.reduce_scatterv = scatter_reduced  # SGLang 0.5.23


def scatter_reduced(group: Any, input_: Any, output: Any = None, sizes: Any = None) -> Any:
    """Replace ``GroupCoordinator.reduce_scatterv`` by SGLang's own form without NCCL."""
    return group._deterministic_reduce_scatterv(input_, output, sizes)


def copy_rows(dst: Any, src: Any, dim: int, offset: Any, sz: Any, offset_src: bool) -> None:
    """Copy ``sz`` rows from (``offset_src``) or to row ``offset``; the first ones of the other."""
    start, end = int(offset), int(offset) + int(sz)
    if offset_src:
        dst[: end - start].copy_(src[start:end])
    else:
        dst[start:end].copy_(src[: end - start])

"""Puts the parts that are switched on around SGLang's methods.

SGLang 0.5.23 calls ``activate`` in each of its processes, by the entry point ``disagg_lead`` of
the group ``sglang.srt.plugins``. A part is a module of this package with ``install(wrap)``, which
imports the classes that it needs and names the methods that it wraps. With no part on nothing of
SGLang is imported or replaced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple  # Any: SGLang's functions and objects

from sglang.srt.patchset import environment
from sglang.srt.patchset.table import CURRENT_VERSION, LEAD

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


class Part(NamedTuple):
    """A module of this package, and whether it is switched on. ``is_plain``: servers on which it
    was not tried refuse to start with it (``not_tried``)."""

    name: str
    is_on: Callable[[], bool]
    is_plain: bool = True


def _is_local() -> bool:
    return environment.LOCAL_TOKENS.read() + environment.FALLBACK_PREFILL_TOKENS.read() > 0


#: In the order in which they wrap: the later one's function is called first.
PARTS: tuple[Part, ...] = (
    Part("prefill_exit", _is_local),
    Part("local_scheduler", _is_local),
    Part("without_prefill", lambda: environment.FALLBACK_PREFILL_TOKENS.read() > 0),
    Part("thread", lambda: environment.NIXL_PROGRESS_DELAY.read(0) > 0, is_plain=False),
    Part("admission", lambda: environment.DECODE_ADMISSION.read() == "remaining"),
)

#: The parts that are attached in this process.
attached: list[str] = []


def parts_on() -> list[Part]:
    """The parts that the environment switches on.

    Raises:
        ValueError: a variable is set to something that is not allowed.
    """
    if not environment.is_active() or LEAD in environment.DISABLED_GROUPS.read():
        return []
    return [part for part in PARTS if part.is_on()]


def activate() -> None:
    """Called by SGLang's plugin loader.

    Raises:
        SystemExit: a variable or a method of SGLang is not what it has to be. The loader logs any
            other exception and starts the server without the plugin.
    """
    if not environment.is_active():
        return
    try:
        environment.check()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    parts = parts_on()
    if not parts or attached:
        return
    found = metadata.version("sglang")
    if found != CURRENT_VERSION:
        logger.warning(
            "inert: the group %s is for SGLang %s, found %s", LEAD, CURRENT_VERSION, found
        )
        return
    wraps = Wraps()
    for part in parts:
        importlib.import_module(f"{__package__}.{part.name}").install(wraps)
    if any(part.is_plain for part in parts):
        _refuse_at_start(wraps)
    if wraps.misfits:
        raise SystemExit(f"SGLang {found} is not as recorded: {'; '.join(wraps.misfits)}")
    wraps.bind()
    attached.extend(part.name for part in parts)


class Wraps:
    """Methods to be replaced, all or none."""

    def __init__(self) -> None:
        self._wanted: list[tuple[type, str, Function]] = []
        #: What does not fit, each by its name.
        self.misfits: list[str] = []

    def __call__(self, owner: type, name: str, signature: str) -> Callable[[Function], Function]:
        """A decorator: the function gets the stock method before the method's own arguments, and
        takes its place in ``owner`` and wherever that class is inherited or bound.

        ``signature``: the stock method's in 0.5.23, without annotations, as ``"(self, req)"``.
        """
        stock = getattr(owner, name, None)
        found = "nothing" if stock is None else shape(stock)
        if found != signature:
            self.misfits.append(f"{owner.__name__}.{name} is {found}, not {signature}")

        def note(ours: Function) -> Function:
            self._wanted.append((owner, name, ours))
            return ours

        return note

    def bind(self) -> None:
        """Replace them."""
        for owner, name, ours in self._wanted:
            stock = getattr(owner, name)
            setattr(owner, name, _around(stock, ours))


def _around(stock: Function, ours: Function) -> Function:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(functools.partial(stock, self), self, *args, **kwargs)

    return method


def shape(function: Function) -> str:
    """The signature of ``function`` without annotations."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _refuse_at_start(wrap: Wraps) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    @wrap(Scheduler, "init_disaggregation", "(self)")
    def init_disaggregation(stock: Function, self: Any) -> None:
        reasons = list(not_tried(self))
        if reasons:
            raise ValueError(
                f"{', '.join(part.name for part in parts_on() if part.is_plain)} of the group "
                f"{LEAD} was not tried with {', '.join(reasons)}: leave out either"
            )
        stock()


def not_tried(scheduler: Any) -> Iterator[str]:
    """What of a server the parts were not tried with, by flag or by kind of model."""
    from sglang.srt import runtime_context as settings
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.environ import envs

    disagg, memory, parallel = settings.get_disagg(), settings.get_memory(), settings.get_parallel()
    if disagg.disaggregation_mode == "null":
        return
    run, spec, tree = settings.get_exec(), settings.get_spec(), scheduler.tree_cache
    found = {
        "--disaggregation-transfer-backend other than nixl": disagg.disaggregation_transfer_backend
        != "nixl",
        "--pp-size": parallel.pp_size > 1,
        "--enable-dp-attention": parallel.enable_dp_attention,
        "--attn-cp-size": parallel.attn_cp_size > 1,
        "--enable-lora": scheduler.enable_lora,
        "--enable-hisparse": scheduler.enable_hisparse,
        "--enable-pdmux": disagg.enable_pdmux,
        "--enable-pd-role-switch": disagg.enable_pd_role_switch,
        "--disaggregation-decode-allocation-policy": disagg.disaggregation_decode_allocation_policy
        == "prefill_complete",
        "a model with sliding windows (SWA)": tree.supports_swa(),
        "a model with Mamba states": tree.supports_mamba(),
        "a model with sparse attention (DSA)": is_deepseek_dsa(scheduler.model_config.hf_config),
    }
    on_decode = {
        "decode without --disaggregation-decode-enable-radix-cache": (
            not disagg.disaggregation_decode_enable_radix_cache
        ),
        # Another tree, or requests whose KV is also in another place.
        "--enable-hierarchical-cache on decode": memory.enable_hierarchical_cache,
        "--enable-unified-cache-external-linker": memory.enable_unified_cache_external_linker,
        "--enable-session-radix-cache": memory.enable_session_radix_cache,
        "--enable-streaming-session": settings.get_serving().enable_streaming_session,
        "a tree other than SGLang's own": type(tree).__name__ != "UnifiedRadixCache",
        "--disaggregation-decode-enable-offload-kvcache": (
            disagg.disaggregation_decode_enable_offload_kvcache
        ),
        "--disaggregation-decode-host-receive-threshold": (
            disagg.disaggregation_decode_host_receive_threshold < 1
        ),
        "--disaggregation-decode-retraction-backup host_pool": (
            disagg.disaggregation_decode_retraction_backup == "host_pool"
        ),
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        # Pools whose slots are not counted, or copied to the CPU, token by token.
        "--dcp-size": parallel.attn_dcp_size > 1,
        "--enable-unified-memory": memory.enable_unified_memory,
        "--kv-cache-dtype with scales": settings.get_model().kv_cache_dtype
        not in ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        # What a batch of new tokens between decode steps has to respect.
        "--moe-a2a-backend": run.moe.moe_a2a_backend != "none",
        "--enable-two-batch-overlap": run.overlap.enable_two_batch_overlap,
        "--enable-deterministic-inference": run.deterministic.enable_deterministic_inference,
        "--enable-priority-scheduling": settings.get_schedule().enable_priority_scheduling,
        # What the first draft of a request starts from.
        "--speculative-algorithm other than EAGLE": spec.speculative_algorithm
        not in (None, "EAGLE"),
        "--speculative-eagle-topk above 1": (spec.speculative_eagle_topk or 1) > 1,
        "--enable-multi-layer-eagle": spec.enable_multi_layer_eagle,
        "--speculative-adaptive": spec.speculative_adaptive,
        "--speculative-use-rejection-sampling": spec.speculative_use_rejection_sampling,
    }
    if disagg.disaggregation_mode == "decode":
        found |= on_decode
    yield from (name for name, holds in found.items() if holds)

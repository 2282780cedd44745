"""The replacement table: every SGLang class that this patch set replaces, and the few names that it
exchanges for a short time.

Rows belong to *groups*, one per feature: all rows of a group are bound or none, and each group can
be switched off by its name (:mod:`sglang.srt.patchset.attach`).

To add a row, write a *mixin*: a plain class, not a subclass of the upstream one, whose methods call
``super()``. The hook builds ``class Name(Mixin, UpstreamName)`` right after the upstream module has
executed and binds it in that module under the upstream name, so that later imports of the name get
it. Rules for a mixin, checked by :mod:`sglang.srt.patchset.combine`:

* mark every method that overrides an upstream one with ``typing_extensions.override`` (innermost,
  below ``staticmethod`` and the like), and give it the upstream parameters and defaults;
* a method that is not marked must be new;
* a mixin for a dataclass is a dataclass; its fields come after the upstream ones and have defaults;
* a mixin module must not import a name from its target module at its top, because it would get the
  class before its replacement. Import inside the method, or under ``TYPE_CHECKING``.

Rows for one name stack in the order of ``GROUPS``, the last one outermost. Name the module whose
*global* the consumer reads: a row for ``RadixCache`` in ``managers.scheduler`` replaces the tree
that the scheduler builds and leaves all other users of ``RadixCache`` with the stock class.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The only SGLang release whose classes this table replaces.
BASE_VERSION = "0.5.10.post1"
#: The only release on which the group ``lead`` attaches. The group has no rows, because SGLang
#: loads it as a plugin (``LEAD_ATTACH``).
CURRENT_VERSION = "0.5.23"
LEAD = "lead"
LEAD_ATTACH = "sglang.srt.disaggregation.lead.attach"
#: Group of flags and start-up check, which cannot be switched off because it reports what is off.
BASE = "base"


@dataclass(frozen=True)
class Replacement:
    """One row: ``mixin`` ("package.module:Class") is added to the class ``name`` of ``module``.

    ``when``: "package.module:function", which returns True if a server with the given arguments
    needs the mixin. The mixin is then added only to objects of such servers, during construction
    (``Attachment.equip``), and not to the class; it must have no ``__init__``. Used for SGLang's
    scheduler (:mod:`sglang.srt.patchset.start_check`) and its HiCache tree.
    """

    module: str
    name: str
    mixin: str
    why: str
    when: str = ""

    @property
    def target(self) -> str:
        """The replaced name, as "module:Name"."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Exchange:
    """``names`` of ``module`` that are replaced while one object is created there, because SGLang
    looks the classes up in the middle of a method (``attach.exchanged``)."""

    module: str
    names: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Group:
    """Rows that are bound together or not at all: one feature.

    ``needs``: groups without which this group is not attached; every group needs ``base``.
    ``obstacle``: "package.module:function", which returns why the group cannot be attached on this
    machine for a reason other than SGLang's classes, or an empty text. It is called before the
    first row is bound, and must not import a module of the table.
    """

    name: str
    what: str
    rows: tuple[Replacement, ...]
    needs: tuple[str, ...] = ()
    obstacle: str = ""
    exchanges: tuple[Exchange, ...] = ()


_DISAGG = "sglang.srt.disaggregation"
_CACHE = "sglang.srt.mem_cache"

_BASE = (
    Replacement(
        module="sglang.srt.server_args",
        name="ServerArgs",
        mixin="sglang.srt.patchset.args:DisaggArgs",
        why="the flags of the patch set, and their validation",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin="sglang.srt.patchset.start_check:CheckedScheduler",
        why="a flag whose groups are not attached is refused",
    ),
)
_DELTA = (
    Replacement(
        module=f"{_DISAGG}.common.conn",
        name="CommonKVManager",
        mixin=f"{_DISAGG}.delta.manager:DeltaManager",
        why="rooms that end early, lost peers; a failed room stays failed",
    ),
    Replacement(
        module=f"{_DISAGG}.common.conn",
        name="CommonKVBootstrapServer",
        mixin=f"{_DISAGG}.delta.manager:DeltaBootstrapServer",
        why="prefill reports that it supports decode_prefix_len",
    ),
    Replacement(
        module=f"{_DISAGG}.common.conn",
        name="CommonKVReceiver",
        mixin=f"{_DISAGG}.delta.decode.connection:DeltaReceiver",
        why="decode announces its prefix in an additional frame",
    ),
    Replacement(
        module=f"{_DISAGG}.prefill",
        name="SchedulerDisaggregationPrefillMixin",
        mixin=f"{_DISAGG}.delta.prefill.scheduler:DeltaPrefill",
        why=(
            "the send cursor starts at the prefix; a request ends on all ranks at once, uncomputed "
            "if its room has failed"
        ),
    ),
    Replacement(
        module="sglang.srt.managers.tokenizer_manager",
        name="TokenizerManager",
        mixin=f"{_DISAGG}.delta.prefill.yielded:YieldingTokenizer",
        why="with local prefill, the client gets prefill's answer at once",
    ),
    Replacement(
        module="sglang.srt.managers.tokenizer_manager",
        name="TokenizerManager",
        mixin=f"{_DISAGG}.delta.unserved:PairTokenizer",
        why=(
            "each parallel sample has its own room; a request that would crash the servers gets "
            "status 400"
        ),
    ),
    Replacement(
        module="sglang.srt.managers.scheduler_output_processor_mixin",
        name="SchedulerOutputProcessorMixin",
        mixin=f"{_DISAGG}.delta.unserved:PairOutput",
        why="routed experts and hidden states reach the requests that asked for them",
    ),
    Replacement(
        module="sglang.srt.constrained.base_grammar_backend",
        name="BaseGrammarBackend",
        mixin=f"{_DISAGG}.delta.unserved:CheckedGrammars",
        why="a grammar that its library rejects with an exception gets status 400",
    ),
    Replacement(
        module="sglang.srt.constrained.llguidance_backend",
        name="GuidanceGrammar",
        mixin=f"{_DISAGG}.delta.unserved:GuidedMask",
        why="a grammar that allows no token ends its request, not the server",
    ),
    Replacement(
        module="sglang.srt.sampling.sampling_batch_info",
        name="SamplingBatchInfo",
        mixin=f"{_DISAGG}.delta.unserved:MaskedBatch",
        why="the same for other grammar libraries",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler_pp_mixin",
        name="SchedulerPPMixin",
        mixin=f"{_DISAGG}.delta.prefill.stages:PrefillStages",
        why=(
            "all pipeline stages admit and end the same requests, also those that fail on one stage"
        ),
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_DISAGG}.delta.prefill.scheduler:DeltaScheduler",
        why=(
            "an aborted request ends its room, a refused one is not computed; priorities; "
            "prefill's counters; no idle sleep while a room is open"
        ),
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_DISAGG}.delta.decode.invariants:BalancedScheduler",
        why="an idle server with inconsistent pools or tables ends",
        when="sglang.srt.patchset.flags:checks_invariants",
    ),
)
_NIXL_ASYNC = (
    Replacement(
        module=f"{_DISAGG}.nixl.conn",
        name="TransferInfo",
        mixin=f"{_DISAGG}.delta.nixl.conn:NixlTransferInfo",
        why="reads the delta frame; an empty page list no longer means a dummy",
    ),
    Replacement(
        module=f"{_DISAGG}.nixl.conn",
        name="TransferStatus",
        mixin=f"{_DISAGG}.delta.nixl.manager:DeltaTransferStatus",
        why="a room is complete when each of its writers has delivered everything",
    ),
    Replacement(
        module=f"{_DISAGG}.nixl.conn",
        name="NixlKVManager",
        mixin=f"{_DISAGG}.delta.nixl.manager:DeltaNixlManager",
        why="full prefix hits, head slices of any sizes, counted bytes, malformed messages",
    ),
    Replacement(
        module=f"{_DISAGG}.nixl.conn",
        name="NixlKVSender",
        mixin=f"{_DISAGG}.delta.nixl.conn:DeltaNixlSender",
        why="prefill checks the announcement and sends the delta; an error fails its own room",
    ),
    Replacement(
        module=f"{_DISAGG}.nixl.conn",
        name="NixlKVReceiver",
        mixin=f"{_DISAGG}.delta.decode.connection:RoomReceiver",
        why="a finished or failed room leaves no table entries",
    ),
)
_MOONCAKE_DELTA = (
    Replacement(
        module=f"{_DISAGG}.mooncake.conn",
        name="TransferInfo",
        mixin=f"{_DISAGG}.delta.mooncake.conn:MooncakeTransferInfo",
        why="reads the delta frame, and whether the rank is a dummy",
    ),
    Replacement(
        module=f"{_DISAGG}.mooncake.conn",
        name="MooncakeKVManager",
        mixin=f"{_DISAGG}.delta.mooncake.conn:DeltaMooncakeManager",
        why="full prefix hits, head slices of any sizes, counted bytes, transfer workers",
    ),
    Replacement(
        module=f"{_DISAGG}.mooncake.conn",
        name="MooncakeKVSender",
        mixin=f"{_DISAGG}.delta.mooncake.conn:DeltaMooncakeSender",
        why="prefill checks the announcement and sends the delta; an error fails its own room",
    ),
    Replacement(
        module=f"{_DISAGG}.mooncake.conn",
        name="MooncakeKVReceiver",
        mixin=f"{_DISAGG}.delta.decode.connection:RoomReceiver",
        why="a finished or failed room leaves no table entries",
    ),
)
_DECODE_RADIX = (
    Replacement(
        module="sglang.srt.managers.tokenizer_manager",
        name="TokenizerManager",
        mixin=f"{_DISAGG}.delta.decode.scheduler:RadixTokenizer",
        why="the error for input_embeds names the flag",
    ),
    Replacement(
        module="sglang.srt.model_executor.model_runner_kv_cache_mixin",
        name="ModelRunnerKVCacheMixin",
        mixin=f"{_DISAGG}.delta.decode.recurrent:RequestStates",
        why="as many recurrent states as requests, since decode's tree has none",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="RadixCache",
        mixin=f"{_DISAGG}.delta.decode.tree:DecodeRadixTree",
        why="only committed KV enters the tree; admission's match is final",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_DISAGG}.delta.decode.scheduler:DisaggScheduler",
        why="start-up checks, flushes during deferred release, counters and log fields",
        when="sglang.srt.patchset.flags:wants_radix_cache",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_DISAGG}.delta.decode.local_scheduler:LocalTurnsScheduler",
        why="computes turns of few new tokens itself, in chunks between decode steps",
        when="sglang.srt.patchset.flags:computes_turns",
    ),
    Replacement(
        module=f"{_DISAGG}.decode",
        name="DecodeRequest",
        mixin=f"{_DISAGG}.delta.decode.queue:CountedEntry",
        why="statistics by priority, which crash a stock decode server",
    ),
    Replacement(
        module=f"{_DISAGG}.decode",
        name="DecodePreallocQueue",
        mixin=f"{_DISAGG}.delta.decode.queue:RadixPreallocQueue",
        why="match, lock, budget, delta pages, announcement",
    ),
    Replacement(
        module=f"{_DISAGG}.decode",
        name="DecodeTransferQueue",
        mixin=f"{_DISAGG}.delta.decode.transfer:RadixTransferQueue",
        why="a committed transfer enters the tree",
    ),
    Replacement(
        module=f"{_DISAGG}.decode_schedule_batch_mixin",
        name="ScheduleBatchDisaggregationDecodeMixin",
        mixin=f"{_DISAGG}.delta.decode.tree:RadixPrebuiltBatch",
        why="the prebuilt batch continues after the shared prefix",
    ),
)
_BUFFER_ONLY = (
    Replacement(
        module=f"{_CACHE}.radix_cache",
        name="TreeNode",
        mixin=f"{_CACHE}.buffer_only.nodes:StoredNode",
        why="a node records which of its pages are in the store",
    ),
    Replacement(
        module=f"{_CACHE}.hiradix_cache",
        name="MHATokenToKVPoolHost",
        mixin=f"{_CACHE}.buffer_only.host_pool:StagingHostPoolMHA",
        why="a staging buffer is smaller than the device pool",
    ),
    Replacement(
        module=f"{_CACHE}.hiradix_cache",
        name="MLATokenToKVPoolHost",
        mixin=f"{_CACHE}.buffer_only.host_pool:StagingHostPoolMLA",
        why="a staging buffer is smaller than the device pool",
    ),
    Replacement(
        module=f"{_CACHE}.hiradix_cache",
        name="NSATokenToKVPoolHost",
        mixin=f"{_CACHE}.buffer_only.host_pool:StagingHostPoolNSA",
        why="a staging buffer is smaller than the device pool",
    ),
    Replacement(
        module=f"{_CACHE}.memory_pool",
        name="NSATokenToKVPool",
        mixin=f"{_CACHE}.buffer_only.host_pool:LoadedIndexPool",
        why="a layer of sparse attention waits for its index before it reads it",
    ),
    Replacement(
        module=f"{_CACHE}.hiradix_cache",
        name="HiCacheController",
        mixin=f"{_CACHE}.buffer_only.host_pool:StagingController",
        why="the pipelines call the store, instead of SGLang's threads",
    ),
    Replacement(
        module=f"{_CACHE}.storage.backend_factory",
        name="StorageBackendFactory",
        mixin=f"{_CACHE}.buffer_only.storage_backends:PartsFactory",
        why="backends store all parts of a page and report each page",
    ),
    Replacement(
        module=f"{_CACHE}.hiradix_cache",
        name="HiRadixCache",
        mixin=f"{_CACHE}.buffer_only.tree:SwitchedTree",
        why="a tree becomes a buffer-only one where the arguments ask for it",
    ),
    Replacement(
        module=f"{_CACHE}.hiradix_cache",
        name="HiRadixCache",
        mixin=f"{_CACHE}.buffer_only.tree:BufferOnlyTree",
        why="device and store, with a staging buffer between them",
        when="sglang.srt.patchset.flags:wants_buffer_only",
    ),
    Replacement(
        module="sglang.srt.managers.schedule_policy",
        name="PrefillAdder",
        mixin=f"{_CACHE}.buffer_only.scheduler:ReadyPreemption",
        why="no request is preempted for one that still waits for its prefetch",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_CACHE}.buffer_only.store_scheduler:StoreScheduler",
        why="keys name the weights of the server",
        when="sglang.srt.patchset.flags:wants_buffer_only",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_CACHE}.buffer_only.scheduler:BufferOnlyScheduler",
        why="prefetch, namespaces, storage hits; traffic to the store counts as work",
        when="sglang.srt.patchset.flags:loads_from_store",
    ),
)
_DECODE_OFFLOAD = (
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="RadixCache",
        mixin=f"{_DISAGG}.delta.decode.offload:OffloadTree",
        why="nodes that decode computed wait to be written to the store",
        when="sglang.srt.patchset.flags:writes_to_store",
    ),
    Replacement(
        module="sglang.srt.managers.scheduler",
        name="Scheduler",
        mixin=f"{_DISAGG}.delta.decode.offload:OffloadScheduler",
        why="drives writes to the store between decode steps; replaces SGLang's manager",
        when="sglang.srt.patchset.flags:writes_to_store",
    ),
)

#: Groups in binding order.
GROUPS: tuple[Group, ...] = (
    Group("base", "flags, and the check at scheduler start that what they need is attached", _BASE),
    Group(
        "delta",
        "the protocol of both sides: prefixes, rooms that end early, peers",
        _DELTA,
        exchanges=(
            Exchange(
                module=f"{_DISAGG}.common.conn",
                names=("get_zmq_socket_on_host",),
                why="a rank's socket bounds the size of a frame",
            ),
        ),
    ),
    Group(
        "nixl_async",
        "asynchronous NIXL transfer",
        _NIXL_ASYNC,
        needs=("delta",),
        obstacle=f"{_DISAGG}.delta.nixl.agent:obstacle",
        exchanges=(
            Exchange(
                module="nixl._api",
                names=("nixl_agent", "nixl_agent_config", "nixlBind.nixlAgentConfig"),
                why="the manager's agent is safe for several threads, and sleeps while idle",
            ),
        ),
    ),
    Group(
        "mooncake_delta",
        "the delta protocol over Mooncake",
        _MOONCAKE_DELTA,
        needs=("delta",),
        obstacle=f"{_DISAGG}.delta.mooncake.backend:obstacle",
    ),
    Group("decode_radix", "decode-side radix cache", _DECODE_RADIX, needs=("delta",)),
    Group(
        "buffer_only",
        "buffer-only host memory for HiCache",
        _BUFFER_ONLY,
    ),
    Group(
        "decode_offload",
        "decode's answers and local turns go to the shared store",
        _DECODE_OFFLOAD,
        needs=("decode_radix", "buffer_only"),
    ),
)

TABLE: tuple[Replacement, ...] = tuple(row for group in GROUPS for row in group.rows)

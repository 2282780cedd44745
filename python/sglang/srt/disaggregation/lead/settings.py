"""Settings of SGLang 0.5.23 with which the parts of the group are refused.

Checked when SGLang resolves its arguments: before a process is started, and in each scheduler
before it loads weights. A row is the setting as ``flags.is_given`` reads it, and the reason.
``python -m benchmark.tables`` prints the rows into the page of the group. A test has a verdict on
every other argument of that release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any  # Any: SGLang's arguments and model configuration

from sglang.srt.patchset import environment
from sglang.srt.patchset.flags import NO_PREFIX_CHUNKS, is_given
from sglang.srt.patchset.table import LEAD

if TYPE_CHECKING:
    from sglang.srt.disaggregation.lead.attach import Function, Wraps

_LOOP = "another event loop, or another order of admission"

#: Refused on prefill and on decode: setting -> reason.
ON_BOTH: dict[str, str] = {
    "another --disaggregation-transfer-backend than nixl": (
        "only NIXL's manager on prefill notes that decode computes a request"
    ),
    "--use-ray": "SGLang's schedulers load no plugins there",
    "--optimistic-prefill-attempts above 0": (
        "a request that prefill computes before its room is ready cannot be released"
    ),
    **dict.fromkeys(
        ("--pp-size above 1", "--attn-cp-size above 1", "--enable-prefill-cp"),
        "ranks would have to agree across stages or groups",
    ),
    "--elastic-ep-backend": "ranks may leave and join, and all of them must agree",
    **dict.fromkeys(("--enable-lora", "--lora-paths"), "a local turn would need its adapter"),
    **dict.fromkeys(
        (
            *("--enable-hisparse", "--enable-kv-cache-sharding", "--dcp-size above 1"),
            *("--enable-unified-memory", "--enable-page-major-kv-layout"),
        ),
        "a slot is not a token of this rank's pool, or its copy is not one of tokens",
    ),
    **dict.fromkeys(
        (
            *("--enable-lmcache", "--enable-flexkv", "--radix-cache-backend"),
            "--enable-unified-cache-external-linker",
        ),
        "KV is also in other places",
    ),
    **dict.fromkeys(
        (
            *("--enable-pdmux", "--enable-pd-role-switch", "--dllm-algorithm"),
            "another --disaggregation-decode-allocation-policy than early",
            "another --decoupled-spec-role than null",
        ),
        _LOOP,
    ),
    **dict.fromkeys(("--is-embedding", "--enable-mis"), "there is no token to generate"),
    "--language-only": "images are computed by another server",
    "--disaggregation-enable-kv-checksum": "not run with KV that decode computes",
    "another --kv-canary than none": "not run with KV that decode computes",
}

#: Refused on decode: setting -> reason.
ON_DECODE: dict[str, str] = {
    "no --disaggregation-decode-enable-radix-cache": "the parts match prompts against the tree",
    "--enable-streaming-session": (
        "a session keeps memory between its requests, which admission does not count"
    ),
    "--disaggregation-decode-enable-offload-kvcache": (
        "SGLang stores answers only, so the store would lack the prompts of local turns"
    ),
    "--disaggregation-decode-retraction-backup host_pool": (
        "without HiCache SGLang never unlocks what it copies to the host pool"
    ),
    "--disaggregation-decode-retraction-backup none": (
        "a retracted request fails, and admission retracts more of them"
    ),
    "another --kv-cache-dtype than auto, bf16, bfloat16, fp8_e4m3, fp8_e5m2": (
        "resume copies a part of a request's KV, and no scales"
    ),
    "another --radix-eviction-policy than lru": "what it can evict was not compared",
    **dict.fromkeys(
        (
            *("--enable-two-batch-overlap", "--enable-single-batch-overlap"),
            *("--enable-mixed-chunk", "--rl-on-policy-target", "--enable-deterministic-inference"),
        ),
        "a chunk of a prompt was not run as such a batch",
    ),
    "another --moe-a2a-backend than none, deepep": (
        "SGLang runs only decode steps with it (mooncake, nixl, pplx), or it was not run"
    ),
    "--deepep-mode low_latency": (
        "its buffers are made for decode steps, and a chunk of a prompt does not fit"
    ),
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1": (
        "data parallel ranks then do not learn that one of them runs a chunk"
    ),
    **dict.fromkeys(
        (
            "--enable-priority-scheduling",
            "--disaggregation-decode-polling-interval above 1",
            "another --retraction-policy than length",
        ),
        _LOOP,
    ),
    **dict.fromkeys(
        (
            "another --speculative-algorithm than EAGLE",
            *("--speculative-eagle-topk above 1", "--enable-multi-layer-eagle"),
            *("--speculative-adaptive", "--speculative-use-rejection-sampling"),
            *("--speculative-use-block-verification", "--speculative-token-map"),
            *("--speculative-draft-window-size", "--speculative-draft-sink-size"),
            "another --speculative-moe-a2a-backend than none",
        ),
        "what a request's first draft starts from has another form, or was not run",
    ),
    **dict.fromkeys(
        (
            *("--enable-watermark", "--enable-custom-logit-processor"),
            *("--enable-return-aux-hidden-states", "--enable-strict-thinking"),
        ),
        "what the server adds to a token was not run for the first token of a local turn",
    ),
}


WINDOWS = "a model with sliding windows (SWA)"
STATES = "a model with Mamba states"
SPARSE = "a model with sparse attention (DSA and others)"
OTHER_POOLS = "it has pools of other kinds beside the KV"


def install(wrap: Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.server_args import ServerArgs

    @wrap(ServerArgs, "resolve_once", "(self)")
    def resolve_once(stock: Function, self: Any) -> None:
        stock()
        args = resolved_view(self)
        if args.disaggregation_mode == "null":
            return
        reasons = list(refused(args, model_config_of(self)))
        if reasons:
            variables = ", ".join(environment.given(LEAD))
            raise ValueError(
                f"{variables} cannot be combined with {'; '.join(reasons)}. Remove one of them."
            )


def refused(args: Any, config: Any) -> Iterator[str]:
    """Yield each refused setting of a server with the reason. ``config``: its ``ModelConfig``."""
    is_decode = args.disaggregation_mode == "decode"
    for setting, why in (ON_BOTH | ON_DECODE if is_decode else ON_BOTH).items():
        if is_given(args, setting):
            yield f"{setting}: {why}"
    for kind, holds in _kinds(config).items():
        if holds:
            yield f"{kind}: {OTHER_POOLS}"
    if is_decode and _chunks_of_prefixes_fail(args, config):
        yield MLA
    if is_decode and args.attn_dp_size > 1 and args.speculative_algorithm is not None:
        yield DRAFTS


#: Refused because drafts beside a chunk of another rank were not run.
DRAFTS = "--attn-dp-size above 1 with --speculative-algorithm: not run with drafts"
#: Refused because SGLang sets up no prefix chunks on a decode server
#: (``FlashInferMLAAttnBackend``).
MLA = (
    f"--attention-backend {', '.join(sorted(NO_PREFIX_CHUNKS))} for a model with MLA without "
    "--disable-chunked-prefix-cache: a local turn behind a long prefix would end the server"
)


def _chunks_of_prefixes_fail(args: Any, config: Any) -> bool:
    if config.attention_arch.name != "MLA" or args.disable_chunked_prefix_cache:
        return False
    backend = args.prefill_attention_backend or args.attention_backend
    return not NO_PREFIX_CHUNKS.isdisjoint({backend, args.speculative_draft_attention_backend})


def _kinds(config: Any) -> dict[str, bool]:
    """Return each refused kind of model with True if ``config`` is of it."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse

    is_sparse = is_deepseek_dsa(config.hf_config) or is_minimax_sparse(config.hf_config)
    return {
        WINDOWS: bool(config.is_hybrid_swa),
        STATES: mambaish_config(config) is not None,
        SPARSE: is_sparse,
    }

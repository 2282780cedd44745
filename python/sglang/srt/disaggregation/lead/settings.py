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

_TREE = "KV is also in other places, or stays locked between requests"

#: Refused on prefill and on decode: setting -> reason.
ON_BOTH: dict[str, str] = {
    "another --disaggregation-transfer-backend than nixl": (
        "only NIXL's manager on prefill notes that decode computes a request"
    ),
    "--use-ray": "SGLang's schedulers load no plugins there",
    "--enable-pd-role-switch": "settings are checked for the first role only",
    **dict.fromkeys(
        (
            *("--dp-size above 1", "--attn-dp-size above 1", "--enable-dp-attention"),
            "--elastic-ep-backend",
        ),
        "ranks would have to agree across replicas or groups",
    ),
    **dict.fromkeys(("--enable-lora", "--lora-paths"), "a local turn would need its adapter"),
    **dict.fromkeys(("--enable-streaming-session", "--enable-session-radix-cache"), _TREE),
}

#: Refused on decode: setting -> reason.
ON_DECODE: dict[str, str] = {
    "no --disaggregation-decode-enable-radix-cache": "the parts match prompts against the tree",
    "--disable-radix-cache": (
        "SGLang turns the tree off, also with --enable-mis or with "
        "--enable-deterministic-inference and FlashInfer"
    ),
    "--pp-size above 1": "SGLang's loop for stages runs no chunks on decode",
    **dict.fromkeys(
        ("--dcp-size above 1", "--enable-unified-memory"),
        "a slot is not a token of this rank's pool",
    ),
    **dict.fromkeys(
        (
            *("--enable-hierarchical-cache", "--enable-flexkv", "--radix-cache-backend"),
            "--enable-unified-cache-external-linker",
        ),
        _TREE,
    ),
    **dict.fromkeys(
        (
            "--disaggregation-decode-enable-offload-kvcache",
            "another --disaggregation-decode-host-receive-threshold than 1.0, 1",
            "--disaggregation-decode-retraction-backup host_pool",
            "SGLANG_DISAGG_STAGING_BUFFER=1",
        ),
        "KV waits in host memory, which the parts neither count nor read in part",
    ),
    "--disaggregation-decode-retraction-backup none": (
        "admission retracts requests, and without a copy they are lost"
    ),
    "another --kv-cache-dtype than auto, bf16, bfloat16, fp8_e4m3, fp8_e5m2, mxfp8": (
        "SGLang's copy of a retracted request has no scales"
    ),
    "--enable-strict-thinking": "the mask of its grammar needs a GPU and was not run",
    "another --kv-canary than none": "SGLang's canary needs a GPU and was not run",
    "--disaggregation-enable-kv-checksum": "SGLang's checksums need a GPU and were not run",
    **dict.fromkeys(
        ("another --moe-a2a-backend than none", "--enable-two-batch-overlap"),
        "a chunk of a prompt was not run as such a batch",
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

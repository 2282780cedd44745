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


#: Refused on prefill and on decode: setting -> reason.
ON_BOTH: dict[str, str] = {
    "another --disaggregation-transfer-backend than nixl, mooncake": "others were not run",
    "--use-ray": "SGLang's schedulers load no plugins there",
    "--enable-pd-role-switch": "settings are checked for the first role only",
    "--elastic-ep-backend": "ranks may leave and join, and all of them must agree",
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
        ("--enable-flexkv", "--radix-cache-backend", "--enable-unified-cache-external-linker"),
        "KV is also in other places",
    ),
    "--enable-hierarchical-cache": (
        "its tree shows KV whose copy from host memory has not ended, and a chunk would read it"
    ),
    "--enable-lora-overlap-loading": "ranks load adapters at different times, and must agree",
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
    "another --kv-cache-dtype than auto, bf16, bfloat16, fp8_e4m3, fp8_e5m2, mxfp8": (
        "SGLang's copy of a retracted request has no scales"
    ),
    **dict.fromkeys(
        (
            *("--enable-strict-thinking", "another --kv-canary than none"),
            *("--disaggregation-enable-kv-checksum", "--speculative-algorithm DSPARK"),
        ),
        "it needs a GPU and was not run",
    ),
    **dict.fromkeys(
        ("--enable-two-batch-overlap", "another --speculative-moe-a2a-backend than none"),
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
    "--enable-multi-layer-eagle": (
        "models with several draft layers have windows or recurrent states, and were not run"
    ),
}


WINDOWS = "a model of DeepSeek V4"
#: Settings with which the tree takes states within a text, or in another form.
BUFFERED = (
    *("another --mamba-radix-cache-strategy than no_buffer", "--enable-int8-mamba-checkpoint"),
    *("--enable-linear-replayssm", "--enable-linear-replayssm-spec"),
)
STATES = f"a model with Mamba states and {' or '.join(BUFFERED)}"
SPARSE = "a model with sparse attention of MiniMax M3 or with pooled keys of its index"
OTHER_POOLS = "the parts were not run with its pools beside the KV"


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
    for kind, holds in _kinds(config, any(is_given(args, each) for each in BUFFERED)).items():
        if holds:
            yield f"{kind}: {OTHER_POOLS}"
    if is_decode and _chunks_of_prefixes_fail(args, config):
        yield MLA
    if is_decode and args.attn_dp_size > 1 and args.speculative_algorithm is not None:
        yield DRAFTS
    if is_decode and args.attn_dp_size > 1 and args.cuda_graph_config.prefill.backend != "disabled":
        yield GRAPHS


#: Refused because drafts beside a chunk of another rank were not run.
DRAFTS = "--attn-dp-size above 1 with --speculative-algorithm: not run with drafts"
#: Refused because SGLang turns decode steps beside a chunk into chunks, to replay the graph
#: (``_local_prefill_cuda_graph_vote``).
GRAPHS = (
    "--attn-dp-size above 1 with a CUDA graph for prefill, SGLang's default on CUDA: "
    "--disable-prefill-cuda-graph turns it off"
)
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


def _kinds(config: Any, buffers_states: bool) -> dict[str, bool]:
    """Return each refused kind of model with True if ``config`` is of it. ``buffers_states``: one
    of ``BUFFERED`` is given."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import get_dsa_index_kpool_compress, is_minimax_sparse

    model = config.hf_config
    return {
        WINDOWS: bool(config.is_hybrid_swa) and config.is_deepseek_v4_arch,
        STATES: mambaish_config(config) is not None and buffers_states,
        SPARSE: is_minimax_sparse(model) or bool(get_dsa_index_kpool_compress(model)),
    }

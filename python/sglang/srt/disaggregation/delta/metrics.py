"""Declarations of all counters, gauges and histograms of disaggregation (``METRICS``), and the
reasons of failed rooms and refused requests.

A metric is a row of ``_DECLARED`` and is counted by ``observability.STATS``. Docs and dashboards
are checked against it.
"""

from __future__ import annotations

import enum

from sglang.srt.patchset.metric import INFO, Metric, declare


class Reason(str, enum.Enum):
    """Reason of a failed room: label ``reason`` of ``kv_transfer_failed``. Details are in the text
    that goes with it."""

    #: The client aborted, here or on the other side.
    ABORTED = "aborted"
    #: A deadline passed; the text names the environment variable.
    TIMEOUT = "timeout"
    #: The peer was silent, or has restarted.
    PEER_LOST = "peer_lost"
    #: The other side reported a failure.
    PEER_FAILED = "peer_failed"
    #: Decode's announcement does not fit prefill's request.
    MISMATCH = "mismatch"
    #: The transport refused or broke a transfer.
    TRANSPORT = "transport"
    #: Decode and prefill could not be connected.
    HANDSHAKE = "handshake"
    #: A bug here, or a stuck transfer worker.
    INTERNAL = "internal"


#: Why a request is refused memory: the label ``reason`` of ``decode_admission_refused``, and the
#: text of log lines.
REFUSALS = {
    "no_tokens": "not enough free KV tokens",
    "cannot_finish": "its admission could leave a running request without memory for its output",
    "no_request_row": "no free request row",
    "no_state_slot": "no free slot for its recurrent state (--max-mamba-cache-size)",
    "no_metadata_slot": "no free metadata slot",
}

_PREFILL_ONLY = "only prefill sends what the request asks for, or decode cannot compute it"
#: Label ``reason`` of the metric ``decode_turns``, with its meaning. The table in
#: docs/advanced_features/pd_local_turns.md has these rows (a test compares them).
REASONS = {
    "short": "no more new tokens than the flag allows, and no other reason",
    "itl": "no chunk that is worth computing fits into the bound on inter-token latency",
    "long": "more new tokens than the flag allows",
    "no_place": "no place in the running batch is free for it: prefill computes it until one is",
    "peer": "the prefill server does not know local turns: it is stock or older, or has pipeline "
    "stages, several tokenizers (`--tokenizer-worker-num`) or gRPC instead of HTTP",
    "not_shared": "the request may share no prefix: a warm-up, or one from before a flush",
    "input_logprobs": _PREFILL_ONLY,
    "hidden_states": _PREFILL_ONLY,
    "routed_experts": _PREFILL_ONLY,
    "embeddings": _PREFILL_ONLY,
    "multimodal": _PREFILL_ONLY,
    "session": _PREFILL_ONLY,
    "no_output": _PREFILL_ONLY,
    "aborted": "the client has left",
    "no_prefill": "its prefill server could not be reached, or was lost before the request was "
    "announced",
    "transfer_failed": "its transfer failed; it was counted before, when it was announced",
}

# ---- declarations ----

#: Reasons only of turns that decode computes.
_ONLY_LOCAL = ("short", "no_prefill", "transfer_failed")
#: Values of the labels ``where`` and ``reason``. ``no_memory``: on SGLang 0.5.23.
_TURNS = (
    *(("local", reason) for reason in _ONLY_LOCAL),
    *(("remote", reason) for reason in (*REASONS, "no_memory") if reason not in _ONLY_LOCAL),
)

#: Upper bounds in seconds, 10 microseconds to 50 seconds.
SECONDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
#: Upper bounds in bytes, 4 KiB to 4 GiB.
BYTES = tuple(2.0**power for power in range(12, 33, 2))
#: Upper bounds in descriptors.
DESCRIPTORS = tuple(4.0**power for power in range(10))


_DECLARED = (
    INFO,
    *declare(
        "counter",
        "decode",
        {
            "decode_prefix_prompt_tokens": "Prompt tokens of requests admitted by a decode server",
            "decode_prefix_hit_tokens": "Prompt tokens found in the decode radix tree at admission",
            "kv_transfer_requested_bytes": "KV and state bytes that decode requested from prefill",
        },
    ),
    *declare(
        "counter",
        "local",
        {
            "decode_local_tokens": "Prompt tokens that a decode server computed itself",
            "decode_itl_breaches": "Gaps between decode steps, with a chunk of local prefill in "
            "them, that took longer than --disaggregation-decode-local-max-itl-ms",
        },
    ),
    *declare(
        "counter",
        "prefill",
        {
            "kv_transfer_sent_bytes": "Bytes of KV and state that prefill posted to decode servers",
            "kv_transfer_skipped_tokens": "Prompt tokens not sent because decode already held them",
            "kv_transfer_stuck_workers": "Transfer workers that were found stuck or dead",
        },
    ),
    *declare(
        "counter",
        "both",
        {"kv_transfer_failed": "Rooms that failed on this server, by reason"},
        labels=("reason",),
        values=tuple((reason.value,) for reason in Reason),
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_admission_refused": "Requests that were not admitted at once, by reason; once "
            "a request and reason"
        },
        labels=("reason",),
        values=tuple((reason,) for reason in REFUSALS),
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_deferred_kv_release": "Deferred releases of aborted transfers that ended, by "
            "outcome (drained, timeout: prefill has not confirmed that it stopped writing, error)"
        },
        labels=("outcome",),
        values=(("drained",), ("timeout",), ("error",)),
    ),
    *declare(
        "gauge",
        "decode",
        {
            "kv_evictable_tokens": "Tokens in the decode radix tree that may be evicted",
            "num_decode_deferred_kv_release_reqs": "Requests whose aborted transfers prefill "
            "may still write",
            "decode_deferred_kv_release_tokens": "Tokens of aborted transfers that prefill may "
            "still write to",
        },
    ),
    *declare(
        "counter",
        "local",
        {
            "decode_turns": "Requests by the server that computes their new tokens (local: decode),"
            " and why there"
        },
        labels=("where", "reason"),
        values=_TURNS,
    ),
    *declare(
        "histogram",
        "local",
        {
            "decode_itl_seconds": "Gaps between decode steps with tokens for the same request, on "
            "a server with local turns (chunk: whether a chunk of local prefill ran in them)"
        },
        labels=("chunk",),
        values=(("false",), ("true",)),
        buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2),
    ),
    # A *transfer* is one chunk to one peer.
    *declare(
        "gauge",
        "prefill",
        {
            "kv_transfer_waiting": "Transfers that wait in the queues, the most since the last "
            "export",
            "kv_transfer_in_flight": "Transfers under way, the most since the last export",
            "kv_transfer_overdue": "Transfers under way that missed their deadline or broke",
        },
    ),
    *declare(
        "histogram",
        "prefill",
        {
            "kv_transfer_queue_seconds": "From submission until a transfer is posted",
            "kv_transfer_build_seconds": "Making the descriptors of a transfer",
            "kv_transfer_post_seconds": "The transport's calls that start a transfer",
            "kv_transfer_wire_seconds": "From the end of the post until a transfer settled",
        },
        buckets=SECONDS,
    ),
    *declare(
        "histogram",
        "prefill",
        {"kv_transfer_descriptors": "Descriptors of a transfer"},
        buckets=DESCRIPTORS,
    ),
    *declare("histogram", "prefill", {"kv_transfer_bytes": "Bytes of a transfer"}, buckets=BYTES),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}

"""Every counter, gauge and histogram of disaggregation, declared: ``METRICS``, and why rooms fail.

A metric is a row of ``_DECLARED``, and is counted by ``observability.STATS``. Docs and dashboards
are checked against it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # Any: prometheus_client has no types


class Reason(str, enum.Enum):
    """Why a room failed: the values of the label ``reason`` of ``kv_transfer_failed``. A failed
    room has one; the text that goes with it has the details."""

    #: The client went away, here or on the other side.
    ABORTED = "aborted"
    #: A deadline passed; the text names the environment variable.
    TIMEOUT = "timeout"
    #: The peer gave no sign of life, or came back as another process.
    PEER_LOST = "peer_lost"
    #: The other side reported a failure.
    PEER_FAILED = "peer_failed"
    #: What decode announced does not fit.
    MISMATCH = "mismatch"
    #: The transport refused or broke a transfer.
    TRANSPORT = "transport"
    #: Decode and prefill could not be connected.
    HANDSHAKE = "handshake"
    #: A bug here, or a transfer worker that does not go on.
    INTERNAL = "internal"


# ---- declarations ----


@dataclass(frozen=True)
class Metric:
    """One metric: ``sglang:<name>`` on ``/metrics``; a counter's name ends in ``_total`` there."""

    #: Says the unit.
    name: str
    #: "counter", "gauge" or "histogram".
    kind: str
    #: Which servers have it: "decode", "prefill" or "both"; "every": aggregated ones too.
    side: str
    help: str
    #: Labels beside those that SGLang gives all its metrics.
    labels: tuple[str, ...] = ()
    #: Upper ends of a histogram's buckets, rising.
    buckets: tuple[float, ...] = ()
    #: The values of ``labels`` that a scrape shows before the first is counted.
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def exported_name(self) -> str:
        """As a scrape shows it."""
        return f"sglang:{self.name}{'_total' if self.kind == 'counter' else ''}"

    def child(self, labels: Mapping[str, object], **own: str) -> Any:
        """Prometheus' child of this metric (typed by a library without types): ``labels`` are
        SGLang's, ``own`` the values of ``self.labels``. Registered when it is first asked for."""
        return _registered(self, (*labels, *self.labels)).labels(**labels, **own)


@functools.cache
def _registered(metric: Metric, labelnames: tuple[str, ...]) -> Any:
    # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR before the first import.
    import prometheus_client

    options: dict[str, dict[str, Any]] = {
        "counter": {},
        "gauge": {"multiprocess_mode": "mostrecent"},
        "histogram": {"buckets": metric.buckets},
    }
    make = getattr(prometheus_client, metric.kind.capitalize())
    return make(f"sglang:{metric.name}", metric.help, labelnames, **options[metric.kind])


#: Upper bounds in seconds, 10 microseconds to 50 seconds.
SECONDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5))
#: Upper bounds in bytes, 4 KiB to 4 GiB.
BYTES = tuple(2.0**power for power in range(12, 33, 2))
#: Upper bounds in descriptors.
DESCRIPTORS = tuple(4.0**power for power in range(10))


def declare(
    kind: str,
    side: str,
    texts: Mapping[str, str],
    *,
    labels: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    values: tuple[tuple[str, ...], ...] = (),
) -> tuple[Metric, ...]:
    """Metrics of one kind: ``texts`` has the help of each, by name."""
    return tuple(
        Metric(name, kind, side, text, labels, buckets, values) for name, text in texts.items()
    )


_DECLARED = (
    *declare(
        "gauge",
        "every",
        {"disagg_patchset_info": "1; what this server is, in the labels"},
        labels=("version", "groups", "protocol", "flags"),
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_prefix_prompt_tokens": "Prompt tokens of requests admitted by a decode server",
            "decode_prefix_hit_tokens": "Prompt tokens found in the decode radix tree at admission",
            "kv_transfer_requested_bytes": "KV and state bytes that decode requested from prefill",
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
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_spec_verify_steps": "Steps in which the target verified a draft, of requests "
            "that ended",
            "decode_spec_accepted_tokens": "Draft tokens that were accepted in them",
        },
        labels=("prefix",),
    ),
    *declare(
        "gauge",
        "decode",
        {
            "decode_prefix_leases": "Requests that hold a lock on a prefix in the decode radix "
            "tree",
            "decode_protected_tokens": "Tokens in the decode radix tree that requests hold a lock "
            "on",
            "kv_evictable_tokens": "Tokens in the decode radix tree that may be evicted",
            "num_decode_deferred_kv_release_reqs": "Requests whose aborted transfers prefill "
            "may still write",
            "decode_deferred_kv_release_tokens": "Tokens of aborted transfers that prefill may "
            "still write to",
        },
    ),
    *declare(
        "counter",
        "decode",
        {
            "decode_turns": "Requests by the server that computes their new tokens (local: decode),"
            " and why there"
        },
        labels=("where", "reason"),
    ),
    *declare(
        "histogram",
        "decode",
        {
            "decode_itl_seconds": "Gaps between decode steps with tokens for the same request, on "
            "a server with local turns (chunk: whether a chunk of local prefill ran in them)"
        },
        labels=("chunk",),
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
            "kv_transfer_transport_seconds": "A transfer as the transport timed it",
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

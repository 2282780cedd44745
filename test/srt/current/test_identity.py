"""A server of SGLang 0.5.23 identifies the package, and its counters start at zero."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any  # Any: SGLang's answer

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.disaggregation.lead import identity
from sglang.srt.disaggregation.lead.attach import Wraps
from sglang.srt.patchset import __version__
from sglang.srt.patchset.metric import INFO, KEY

if TYPE_CHECKING:
    from current.decode import Decode
    from current.prefill import Prefill
    from current.server import Server

LOCAL = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "512"}
PAUSE = {"SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY": "1000"}


def scraped(name: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and values of the samples with this name."""
    families = prometheus_client.REGISTRY.collect()
    samples = [sample for family in families for sample in family.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name == name]


def identified(server: Server, role: str) -> dict[str, str]:
    """Return the identity of a server, after checking that it is the same in both places, and that
    the alert ``ServerWithoutPackage`` finds it: the labels are those of SGLang's metrics."""
    ((labels, value),) = scraped(INFO.exported_name)
    assert value == 1 and labels["engine_type"] == role
    about = {name: labels[name] for name in INFO.labels}
    shared = server.scheduler.metrics_collector.labels
    assert {**labels} == {**{name: str(shared[name]) for name in shared}, **about}
    answer: Any = server.scheduler.get_internal_state(None)
    assert answer.internal_state[KEY] == about and "tp_size" in answer.internal_state
    return about


def variables(**values: str) -> str:
    return " ".join(f"{name}={text}" for name, text in values.items())


@pytest.mark.server("--enable-metrics", env=LOCAL | PAUSE)
def test_a_decode_server_with_parts(decode: Decode) -> None:
    """Guards against a healthy server that the alert reports, a canary that can only be checked by
    a shell on it, and a first event that ``rate`` does not see."""
    expected = {"version": __version__, "groups": "lead", "protocol": "sglang"}
    about = identified(decode, "decode")
    assert about == {**expected, "flags": variables(**PAUSE, **LOCAL)}
    turns = METRICS["decode_turns"]
    counts = {
        (labels["where"], labels["reason"]): value for labels, value in scraped(turns.exported_name)
    }
    assert counts == dict.fromkeys(turns.values, 0)
    for name in ("decode_local_tokens", "decode_itl_breaches"):
        assert [value for _, value in scraped(METRICS[name].exported_name)] == [0]
    assert not scraped("sglang:kv_transfer_failed_total"), "counted by nothing on this release"


@pytest.mark.server("--enable-metrics", mode="prefill")
def test_a_prefill_server_without_variables(prefill: Prefill) -> None:
    """Guards against an alert for a server on which no variable has to be set, because only decode
    reads it."""
    assert identified(prefill, "prefill")["flags"] == ""


@pytest.mark.server()
def test_without_metrics(decode: Decode) -> None:
    """Guards against a metric of a server that exports none."""
    assert not scraped(INFO.exported_name)
    answer: Any = decode.scheduler.get_internal_state(None)
    assert answer.internal_state[KEY]["groups"] == "lead"


@pytest.mark.server()
def test_a_process_without_a_scheduler_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a detokenizer that is larger and slower to start."""
    monkeypatch.delitem(sys.modules, identity.SCHEDULER, raising=False)
    identity.install(Wraps())
    assert identity.SCHEDULER not in sys.modules

"""A started scheduler identifies the package: in the log, on ``/metrics`` and in
``/server_info``."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.patchset import __version__, status
from sglang.srt.server_args import ServerArgs

LABELS = {"model_name": "tiny", "engine_type": "decode"}
FLAGS = "--disaggregation-decode-enable-radix-cache --disaggregation-decode-local-tokens=256"


@pytest.fixture
def args() -> ServerArgs:
    """Arguments of a decode server with two flags of the package."""
    return ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        disaggregation_mode="decode",
        disaggregation_transfer_backend="nixl",
        disaggregation_decode_enable_radix_cache=True,
        disaggregation_decode_local_tokens=256,
    )


@pytest.fixture(autouse=True)
def engineless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace SGLang's own constructor and answer by their results that the package reads."""

    def construct(self: Any, server_args: ServerArgs, tp_rank: int, has_metrics: bool) -> None:
        self.server_args, self.tp_rank, self.pp_rank, self.dp_rank = server_args, tp_rank, 0, None
        self.current_scheduler_metrics_enabled = has_metrics
        self.metrics_collector = SimpleNamespace(labels=LABELS)

    def answer(self: Any, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        return GetInternalStateReqOutput(internal_state=vars(self.server_args))

    stock = [cls for cls in Scheduler.__mro__ if cls.__name__ == "Scheduler"][-1]
    monkeypatch.setattr(stock, "__init__", construct)
    monkeypatch.setattr(stock, "get_internal_state", answer)


def test_a_started_server_identifies_the_package(
    args: ServerArgs, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a rollout that can only be checked by a shell on each server. SGLang answers
    ``/server_info`` with the dict of its arguments itself, so additions must not stay in it."""
    with caplog.at_level(logging.INFO):
        scheduler = Scheduler(args, 0, True)
    (logged,) = [text for text in caplog.messages if "sglang-disagg-patchset" in text]
    assert f"sglang-disagg-patchset {__version__}: feature groups base,delta,nixl_async" in logged
    assert logged.endswith(f"delta protocol 1; flags {FLAGS}")

    before = dict(vars(args))
    about = scheduler.get_internal_state(GetInternalStateReq()).internal_state["disagg_patchset"]
    assert vars(args) == before
    assert (about["version"], about["flags"]) == (__version__, FLAGS)

    sample = prometheus_client.REGISTRY.get_sample_value
    assert sample("sglang:disagg_patchset_info", {**LABELS, **about}) == 1


def test_one_line_a_server_and_no_metric_where_there_are_none(
    args: ServerArgs, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a log line for every rank, and a start that fails without
    ``--enable-metrics``."""
    with caplog.at_level(logging.INFO):
        Scheduler(args, 1, False)
    assert [text for text in caplog.messages if "sglang-disagg-patchset" in text] == []


def test_unused_groups_are_not_examined(args: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that imports NIXL, or reports it missing, to identify the package."""
    monkeypatch.setattr(status.attachment, "examine", lambda name: pytest.fail(f"examined {name}"))
    args.disaggregation_mode, args.disaggregation_decode_enable_radix_cache = "null", False
    scheduler = Scheduler(args, 0, False)
    answer = scheduler.get_internal_state(GetInternalStateReq())
    assert "base" in answer.internal_state["disagg_patchset"]["groups"]

"""What is reported: from the owners' books, with units in the names, each token once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
from prometheus_client import REGISTRY

from sglang.srt.mem_cache.buffer_only import metrics
from sglang.srt.mem_cache.buffer_only.backup_queue import BackupQueue
from sglang.srt.mem_cache.buffer_only.settings import shares
from sglang.srt.mem_cache.buffer_only.stage import Direction, Stage
from sglang.srt.mem_cache.buffer_only.store_client import Fault
from unit.buffer_only.nodes import chain

LABELS = {"tp_rank": 0, "storage_backend": "unit test"}


def value(name: str, **more: str) -> float | None:
    labels = {key: str(text) for key, text in (LABELS | more).items()}
    return REGISTRY.get_sample_value(f"sglang:hicache_buffer_{name}", labels)


@pytest.mark.hazard("wrong-gauges")
def test_gauges_and_counters():
    """Gauges are what is there now; counters grow by what has happened since the last update."""
    stage = Stage(16, *shares(16))
    queue = BackupQueue(10)
    counters: Counter[str] = Counter()
    times = metrics.Times()
    client = SimpleNamespace(up=True, under_way=2, overdue=1, faults=Counter())
    store = SimpleNamespace(client=client)
    buffer = SimpleNamespace(
        context=SimpleNamespace(
            stage=stage,
            counters=counters,
            choices=Counter(),
            times=times,
            store=store,
            page_size=64,
        ),
        backups=SimpleNamespace(queue=queue),
    )
    now = 0.0
    times.loaded(20)
    mine = metrics.BufferMetrics(clock=lambda: now)
    mine.update(buffer)  # where nobody scrapes, nothing happens
    collector = mock.Mock()
    mine.bind(LABELS, collector)
    lease = stage.allocate(Direction.BACKUP, 3)
    stage.allocate(Direction.PREFETCH, 2)
    for node in chain(4, 6, 9):
        queue.add(node)
    counters["store_read_pages"], counters["store_written_pages"] = 5, 3
    counters["prefetch_hit_tokens"] = 640
    client.faults[Fault.DEADLINE] += 1
    mine.update(buffer)
    assert (value("pages"), value("write_pages"), value("read_pages")) == (16, 3, 2)
    assert (value("pending_intents"), value("pending_tokens")) == (2, 10)
    assert value("store_read_pages_total") == 5
    labels = {key: str(text) for key, text in LABELS.items()}
    found = REGISTRY.get_sample_value("sglang:storage_prefetch_hit_tokens_total", labels)
    assert found == 640 == value("prefetch_hit_tokens_total"), "as 0.5.23 names it, and as before"
    assert value("dropped_tokens_total", reason="queue_full") == 9
    assert [value(f"store_{name}") for name in ("up", "calls", "overdue_calls")] == [1, 2, 1]
    assert value("store_faults_total", fault="deadline") == 1
    assert value("store_faults_total", fault="error") == 0, "there before the first fault"
    lease.release()
    client.up = False
    counters["store_read_pages"], counters["store_written_pages"] = 7, 4
    mine.update(buffer)
    assert value("write_pages") == 3, "at most once a second"
    now = 1.0
    mine.update(buffer)
    assert value("write_pages") == 0 and value("peak_pages") == 5 and value("store_up") == 0
    assert value("store_faults_total", fault="deadline") == 1
    assert value("store_read_pages_total") == 7
    assert value("load_back_seconds_sum") == 0.02 and times.take() == []
    assert value("prefetch_choices_total", choice="slower") == 0
    # SGLang's own counters, in tokens.
    assert [call.args for call in collector.log_prefetched_tokens.mock_calls] == [(320,), (128,)]
    assert [call.args for call in collector.log_backuped_tokens.mock_calls] == [(192,), (64,)]
    assert value("dropped_tokens_total", reason="queue_full") == 9

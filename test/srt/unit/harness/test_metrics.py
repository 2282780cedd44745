"""Counters: read by exact name, summed over ranks, as a difference between two scrapes."""

from benchmark.harness import metrics
from benchmark.harness.arm import traffic

SCRAPE = """\
# HELP sglang:kv_transfer_sent_bytes_total Bytes of KV sent to decode.
# TYPE sglang:kv_transfer_sent_bytes_total counter
sglang:kv_transfer_sent_bytes_total{tp_rank="0"} 2048.0
sglang:kv_transfer_sent_bytes_total{tp_rank="1"} 4096.0
# HELP sglang:kv_transfer_total_mb Histogram of KV cache transfer size in MB.
# TYPE sglang:kv_transfer_total_mb histogram
sglang:kv_transfer_total_mb_sum{model_name="m"} 1.5
sglang:kv_transfer_total_mb_bucket{le="1.0",model_name="m"} 2.0
sglang:kv_transfer_total_mb_bucket{le="+Inf",model_name="m"} 3.0
sglang:kv_transfer_total_mb_count{model_name="m"} 3.0
"""


def test_samples_are_summed_over_labels_and_buckets_left_out() -> None:
    """Guards against counting one rank only, or a histogram's buckets as values."""
    assert metrics.parse(SCRAPE) == {
        metrics.SENT_BYTES: 6144.0,
        metrics.STOCK_TRANSFER_MB: 1.5,
        "sglang:kv_transfer_total_mb_count": 3.0,
    }


def test_a_counter_that_appears_later_counts_from_zero() -> None:
    """Guards against losing the first increments: labelled counters appear with them."""
    assert metrics.gained({"a": 1.0}, {"a": 3.0, "b": 5.0}) == {"a": 2.0, "b": 5.0}


def test_bytes_moved_are_those_sent_where_they_are_counted() -> None:
    """Guards against the stock count of whole prompts where parts were skipped."""
    both = {metrics.SENT_BYTES: 10.0, metrics.STOCK_TRANSFER_MB: 1.0, metrics.SKIPPED_TOKENS: 4.0}
    assert traffic(both, {}).bytes_moved == 10.0
    assert traffic(both, {}).skipped_tokens == 4.0
    stock = traffic({metrics.STOCK_TRANSFER_MB: 1.5}, {})
    assert (stock.bytes_moved, stock.counted_by) == (1.5 * 2**20, "whole prompts")


def test_the_loopback_counter_grows_with_what_is_sent() -> None:
    """Guards the independent count of bytes on the wire against reading the wrong column."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        before = metrics.loopback_bytes()
        with socket.create_connection(server.getsockname()) as a, server.accept()[0] as b:
            a.sendall(bytes(100_000))
            a.shutdown(socket.SHUT_WR)
            while b.recv(65536):
                pass
        assert metrics.loopback_bytes() - before >= 100_000


def test_samples_by_some_of_their_labels() -> None:
    """Guards against tokens that were found in a cache being counted as computed."""
    text = (
        "# TYPE t_total counter\n"
        't_total{mode="compute",rank="0"} 1.0\n'
        't_total{mode="compute",rank="1"} 2.0\n'
        't_total{mode="cache",rank="0"} 4.0\n'
    )
    assert metrics.by_labels(text, "t_total", "mode") == {("compute",): 3.0, ("cache",): 4.0}
    assert metrics.by_labels(text, "other_total", "mode") == {}

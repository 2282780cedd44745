"""The live view of ``make serve``: from two metrics pages to numbers, and from those to text."""

import math
from collections.abc import Callable, Iterator
from http.client import IncompleteRead
from io import StringIO

import pytest
from rich.console import Console

from benchmark.demo import serve, view
from benchmark.harness import metrics
from benchmark.harness.models import REPOSITORY

TOKEN_BYTES = 2048


def page(**values: float) -> str:
    """A metrics page; ``open``: HTTP requests that are being answered."""
    names = {
        "running": metrics.RUNNING,
        "queue": metrics.QUEUE,
        "prealloc": metrics.PREALLOC_QUEUE,
        "transfer": metrics.TRANSFER_QUEUE,
        "bootstrap": metrics.BOOTSTRAP_QUEUE,
        "used": metrics.USED_TOKENS,
        "evictable": metrics.EVICTABLE_TOKENS,
        "pool": metrics.POOL_TOKENS,
        "prompt": metrics.PROMPT_TOKENS,
        "hit": metrics.HIT_TOKENS,
        "requested": metrics.REQUESTED_BYTES,
        "ttft_sum": f"{metrics.TTFT}_sum",
        "ttft_count": f"{metrics.TTFT}_count",
        "open": f'{metrics.OPEN_REQUESTS}{{endpoint="/generate",method="POST"}}',
        "local": f'{metrics.TURNS}{{where="local",reason="cheaper"}}',
        "remote": f'{metrics.TURNS}{{where="remote",reason="cheaper"}}',
        "long": f'{metrics.TURNS}{{where="remote",reason="long"}}',
        "probes": f'{metrics.TURNS}{{where="remote",reason="not_shared"}}',
    }
    scrape = f'{metrics.OPEN_REQUESTS}{{endpoint="/metrics",method="GET"}} 1.0'
    lines = [f"{names[name]} {value}" for name, value in values.items()]
    return "\n".join([scrape, *lines, ""])


@pytest.mark.parametrize(
    "name",
    [
        metrics.PROMPT_TOKENS,
        metrics.HIT_TOKENS,
        metrics.REQUESTED_BYTES,
        metrics.EVICTABLE_TOKENS,
        metrics.TURNS,
    ],
)
def test_the_view_reads_metrics_of_the_page(name: str) -> None:
    """Guards against zeros of a metric that was renamed. A test compares the page with the code."""
    assert f"| `{name}` |" in (REPOSITORY / "docs/operations/metrics.md").read_text()


PREFILL = view.samples(page(open=3, bootstrap=1, queue=2))
BEFORE = {
    "prefill": PREFILL,
    "decode": view.samples(
        page(prompt=100, hit=0, requested=100 * TOKEN_BYTES, remote=1, ttft_sum=9.0, ttft_count=2)
    ),
}
BUSY = {
    "open": 6,
    "running": 2,
    "prealloc": 3,
    "queue": 1,
    "transfer": 4,
    "used": 38,
    "evictable": 73,
    "pool": 3600,
    "prompt": 400,
    "hit": 200,
    "requested": 190 * TOKEN_BYTES,
    "local": 1,
    "remote": 2,
    "long": 1,
    "probes": 7,
    "ttft_sum": 9.5,
    "ttft_count": 4,
}
NOW = {"prefill": PREFILL, "decode": view.samples(page(**BUSY))}


def test_a_row_is_gauges_now_and_counters_since_the_reading_before() -> None:
    """Guards against a queue that is left out, a total that is shown as what was gained, and a load
    balancer's probe that is shown as a turn."""
    assert view.row(BEFORE, NOW, TOKEN_BYTES) == view.Row(
        silent=(),
        running=2,
        waiting=4,
        in_transfer=4,
        prefill_waiting=3,
        used_tokens=38,
        evictable_tokens=73,
        pool_tokens=3600,
        prompt_tokens=300,
        hit_tokens=200,
        moved_bytes=90 * TOKEN_BYTES,
        saved_bytes=210 * TOKEN_BYTES,  # 200 were held and 10 computed by decode
        local_turns=1,
        remote_turns=2,
        ttft_s=0.25,
    )


def test_nothing_runs_while_no_request_is_open() -> None:
    """Guards against a request that is shown for half a minute after its end: an idle server keeps
    the last value of its gauges."""
    idle = {**NOW, "decode": view.samples(page(**BUSY | {"open": 0}))}
    shown = view.row(NOW, idle, TOKEN_BYTES)
    assert (shown.running, shown.waiting, shown.in_transfer, shown.used_tokens) == (0, 0, 0, 38)


def test_a_silent_server_leaves_the_numbers_of_the_other_one() -> None:
    """Guards against zeros for a server of which nothing is known, and an end of the view."""
    shown = view.row(BEFORE, {**NOW, "prefill": None}, TOKEN_BYTES)
    assert shown.silent == ("prefill",)
    assert (shown.running, shown.hit_tokens) == (2, 200)
    assert math.isnan(shown.prefill_waiting)
    shown = view.row(BEFORE, {**NOW, "decode": None}, TOKEN_BYTES)
    assert math.isnan(shown.running) and math.isnan(shown.saved_bytes)
    assert shown.prefill_waiting == 3
    assert view.line(shown) == (
        "running -; waiting - on decode, - in transfer, 3 on prefill; decode pool - used + "
        "- evictable of - tokens; prefix hits - of - tokens; KV saved - of - MB; turns - local, "
        "- remote; mean TTFT -; decode does not answer"
    )


LINE = (
    "running 2; waiting 4 on decode, 4 in transfer, 3 on prefill; decode pool 38 used + "
    "73 evictable of 3,600 tokens; prefix hits 200 of 300 tokens; KV saved 0.43 of 0.61 MB; "
    "turns 1 local, 2 remote; mean TTFT 250 ms"
)


def test_a_pipe_gets_a_plain_line_when_something_changed_every_ten_seconds() -> None:
    """Guards against control characters and wrapped lines in a log, and one that only grows."""
    out, clock = StringIO(), [0.0]
    printed_at = []

    def readings() -> Iterator[view.Reading]:
        for reading in [BEFORE] * 3 + [NOW] * 30 + [{**NOW, "prefill": None}]:
            before = out.tell()
            yield reading
            printed_at.extend([clock[0]] * (out.tell() > before))
            clock[0] += 1

    view.show(
        readings(), TOKEN_BYTES, Console(file=out, force_terminal=False), clock=lambda: clock[0]
    )
    assert printed_at == [0, 10, 33]
    first, busy, silent = (line[9:] for line in out.getvalue().splitlines())  # after the time
    assert first.startswith("running 0; waiting 0 on decode, 0 in transfer, 3 on prefill;")
    assert busy == LINE
    assert silent == LINE.replace("3 on prefill", "- on prefill") + "; prefill does not answer"
    assert out.getvalue().replace("\n", "").isprintable()


def cells(text: str) -> list[list[str]]:
    """Of the rows of tables in a terminal's text."""
    rows = [[cell.strip() for cell in line.split("\u2502")] for line in text.splitlines()]
    return [row[1:-1] for row in rows if len(row) == 5]


def test_a_terminal_gets_one_table_that_is_drawn_again() -> None:
    """Guards against a table that scrolls, and a first column that never forgets."""
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=110, _environ={"TERM": "xterm"})
    view.show([BEFORE, *[NOW] * view.WINDOW, NOW], TOKEN_BYTES, console)
    assert "\x1b[1A" in out.getvalue()  # up, over the table before
    rows = cells(out.getvalue())
    shown = [row for row in rows if row[0] == "prefix hits"]
    assert shown[0][1:] == ["0 of 0 tokens"] * 2
    assert shown[1][1:] == ["200 of 300 tokens"] * 2
    assert shown[-1][1:] == ["0 of 0 tokens", "200 of 300 tokens"]
    assert ["waiting", "4 on decode, 4 in transfer, 3 on prefill", ""] in rows


def test_a_terminal_names_a_server_that_does_not_answer() -> None:
    """Guards against dashes that nobody explains."""
    out = StringIO()
    silent = view.row(BEFORE, {**NOW, "decode": None}, TOKEN_BYTES)
    Console(file=out, width=110).print(view.table(silent, silent))
    assert "decode does not answer" in out.getvalue()
    assert ["turns", "- local, - remote", "- local, - remote"] in cells(out.getvalue())


def fails(error: Exception) -> Callable[..., str]:
    def page(*_: object) -> str:
        raise error

    return page


@pytest.mark.parametrize(
    "answer",
    [fails(TimeoutError()), fails(IncompleteRead(b"")), lambda *_: "sglang:x not-a-number\n"],
    ids=["late", "cut", "garbled"],
)
def test_what_is_no_metrics_page_is_no_answer(monkeypatch: pytest.MonkeyPatch, answer) -> None:
    """Guards against a view that ends because a server is busy."""
    monkeypatch.setattr(metrics, "page", answer)
    assert serve.read("http://127.0.0.1:1") is None

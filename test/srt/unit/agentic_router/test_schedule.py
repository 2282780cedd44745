"""Routing of requests, and the router's bounded view of each worker; its command line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.agentic.fleet.servers import routed
from benchmark.agentic.fleet.spec import Prefill, Setup
from benchmark.agentic.router.body import GENERATE, Ask, read
from benchmark.agentic.router.cli import main, parser, settings
from benchmark.agentic.router.policies import Work
from benchmark.agentic.router.schedule import NoWorker, Scheduler, Settings
from benchmark.agentic.router.workers import AGGREGATED, DECODE, PREFILL, Half, PrefixIndex, Worker


def ask(ids: list[int], session: str | None = None) -> Ask:
    body = f'{{"input_ids":{ids},"sampling_params":{{"max_new_tokens":8}}}}'
    return read(GENERATE, body.encode(), session, block_tokens=4)


def asking(tokens: int, reserve: int = 10, session: str | None = None) -> Ask:
    """Return a request of that size, without token ids."""
    return Ask(GENERATE, b"{}", (), Work(tokens, reserve), "r", session)


def scheduler(**more: object) -> Scheduler:
    """Return a scheduler with all workers up; two aggregated workers by default."""
    fields = {"block_tokens": 4, "pool_tokens": 400, **more}
    if not {"workers", "prefills", "decodes"} & set(more):
        fields["workers"] = ("http://a", "http://b")
    scheduler_ = Scheduler(Settings(**fields))  # type: ignore[arg-type]
    for worker in scheduler_.workers:
        worker.passed()
    return scheduler_


def aggregated_and_pair(**more: object) -> Scheduler:
    """Return a scheduler with an aggregated worker and a pair."""
    pair = {"prefills": (("http://p", 1),), "decodes": ("http://d",)}
    return scheduler(workers=("http://a",), heavy_threshold=50, **pair, **more)


def end(halves: dict[str, Half]) -> None:
    for half in halves.values():
        half.end("ok")


def load(worker: Worker) -> tuple[int, int, int, int]:
    return worker.requests, worker.pending_tokens, worker.ongoing_tokens, worker.added_tokens


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "take", "end"]),
            st.integers(0, 9),
            st.integers(0, 5000),
            st.integers(0, 5000),
        )
    )
)
def test_loads_add_up_and_return_to_zero(steps: list[tuple[str, int, int, int]]) -> None:
    """Guards against a load that is released twice or never, in any order of calls."""
    worker = Worker(PREFILL, "http://a")
    halves: list[Half] = []
    for step, which, tokens, matched in steps:
        if step == "begin":
            halves.append(Half(worker, asking(tokens), min(tokens, matched)))
        elif halves:
            half = halves[which % len(halves)]
            half.take(b"") if step == "take" else half.end("ok")
        assert min(load(worker)) >= 0
        assert worker.requests == sum(half.outcome is None for half in halves)
    for half in halves:
        half.end("lost")
        half.take(b"")
        assert not half.end("ok")
    assert load(worker) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("answer", "failed", "done"),
    [
        (b'data: {"text": "the \\"error\\": {1}"}\n\ndata: [DONE]', False, True),
        (b'data: {"error": {"message": "m"}}', True, False),
        (b'{"meta_info":{"finish_reason":{"type":"abort","message":"no memory"}}}', True, False),
        (b'data: {"choices": [{"finish_reason": "abort"}]}', True, False),
    ],
)
def test_errors_in_an_answer_are_seen(answer: bytes, failed: bool, done: bool) -> None:
    """Guards against learning a prompt that was not computed, and against a text that looks like an
    error."""
    half = Half(Worker(PREFILL, "http://a"), asking(1), 0)
    assert half.take(answer) is not failed
    assert (half.failed, half.done) == (failed, done)


def test_the_index_forgets_the_end_of_the_oldest_prompt_first() -> None:
    """Guards the order of eviction: a block must not outlive the blocks before it. A match changes
    nothing: candidates that were not chosen must not refresh their blocks."""
    index = PrefixIndex(5)
    index.learn([1, 2, 3])
    index.learn([1, 2, 13, 14])
    assert (index.match([1, 2, 3]), index.match([1, 2, 13, 14])) == (3, 4)
    index.match([1, 2, 3])
    index.learn([21])
    assert (index.match([1, 2, 3]), index.match([1, 2, 13, 14]), len(index)) == (2, 4, 5)
    index.learn([21, 22, 23])
    assert (index.match([1, 2, 13, 14]), index.match([21, 22, 23])) == (2, 3)


def test_health_takes_a_worker_out_and_back_with_an_empty_index() -> None:
    """Guards the thresholds, and against trust in the cache of a process that has ended, also one
    that restarted between two checks."""
    worker = Worker(DECODE, "http://a", fall=2)
    assert not worker.up
    worker.passed(4096)
    assert worker.up and worker.index.entries == 256
    worker.index.learn([1, 2])
    worker.failed("late")
    assert worker.up and len(worker.index) == 2
    worker.failed("late")
    assert not worker.up and len(worker.index) == 0
    worker.passed()
    worker.index.learn([1, 2])
    worker.failed("refused", gone=True)
    assert worker.up and len(worker.index) == 0


@pytest.mark.parametrize(
    ("tokens", "inflight", "offloaded"),
    [(40, False, False), (80, False, True), (80, True, False)],
)
def test_selective_offload(tokens: int, inflight: bool, offloaded: bool) -> None:
    """Guards each gate: heavy requests only, and a bounded number in flight."""
    router = aggregated_and_pair(max_offload_inflight=1)
    request = ask(list(range(tokens)))
    first = router.route(request) if inflight else {}
    halves = router.route(request)
    assert set(halves) == ({PREFILL, DECODE} if offloaded else {AGGREGATED})
    end(halves)
    end(first)
    if inflight:
        assert set(router.route(request)) == {PREFILL, DECODE}


def test_requests_stay_without_a_pair_and_are_refused_without_workers() -> None:
    """Guards against requests that leave aggregated workers while prefill is down, and the error
    text that a client gets."""
    router = aggregated_and_pair()
    assert set(router.route(ask(list(range(80))), ["http://p"])) == {AGGREGATED}
    with pytest.raises(NoWorker, match=r"no aggregated worker and no decode worker is available "):
        router.route(ask([1]), ["http://a", "http://d"])
    assert load(router.pools[PREFILL][0]) == (0, 0, 0, 0)


def test_a_decision_that_cannot_be_written_leaves_no_load() -> None:
    """Guards the counts of a router with a full disk: each failed request would stay counted."""
    router = Scheduler(Settings(workers=("http://a",)), Path("/dev/full"))
    router.workers[0].passed()
    with pytest.raises(OSError, match="space"):
        router.route(ask([1]))
    assert load(router.workers[0]) == (0, 0, 0, 0)


def test_the_command_line_understands_the_harness() -> None:
    """Guards against a parser that differs from the harness that starts the router, and against two
    sets of defaults that drift apart."""
    extra = ("--decode-policy", "round_robin", "--alpha", "0.5", "--max-sessions", "7")
    setup = Setup(("http://h:3",), (Prefill("http://h:1", 8998),), ("http://h:2",))
    config = routed(setup, "lmetric", extra)
    assert config.ready_url == f"{config.url}/readiness"
    args = parser().parse_args(config.command[config.command.index("route") + 1 :])
    assert (args.host, args.port) == ("127.0.0.1", config.port)
    assert settings(args) == Settings(
        workers=("http://h:3",),
        prefills=(("http://h:1", 8998),),
        decodes=("http://h:2",),
        policy="lmetric",
        decode_policy="round_robin",
        alpha=0.5,
        max_sessions=7,
    )
    split = routed(Setup((), setup.prefill, setup.decode), "linear")
    parsed = settings(parser().parse_args(split.command[split.command.index("route") + 1 :]))
    assert parsed.decode_policy == "linear"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "--worker"),
        (["--decode", "http://d"], "--prefill"),
        (["--worker", "http://a", "--worker", "http://a"], "twice"),
    ],
)
def test_workers_without_a_route_are_refused(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a router that could never route."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert names in capsys.readouterr().err

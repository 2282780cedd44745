"""New connections to prefill servers: SGLang's own classes over a scripted network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from component.transfer import bare
from component.transfer.pair import until
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import TransferBackend

HOST, PORT = "10.0.0.1", 8998
ADDRESS = f"{HOST}:{PORT}"


class Network:
    """Prefill servers' bootstrap servers, as far as HTTP shows them."""

    def __init__(self) -> None:
        self.scheduler = threading.current_thread()
        #: What was asked on the scheduler's thread: nothing may be.
        self.blocking: list[str] = []
        self.asked: list[str] = []
        self.dp_size = 1
        self.rank_port = 4000
        #: Data-parallel ranks by room, as far as prefill knows them.
        self.rooms: dict[str, int] = {}
        self.refuses = False
        #: Questions with such a text in them are not answered while it is clear.
        self.hangs = ""
        self.gate = threading.Event()

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if threading.current_thread() is self.scheduler:
            self.blocking.append(what)
        elif self.hangs and self.hangs in what:
            assert self.gate.wait(60)
        if self.refuses:
            raise requests.ConnectionError

    def get(self, url: str, timeout: float, **_: Any) -> Any:
        self._ask(url)
        if "pd_capabilities" in url:
            return SimpleNamespace(status_code=404, ok=False, text="", content=b"")
        if "prefill_dp_rank=-1" in url:
            answer: dict[str, Any] = {
                "attn_tp_size": 1,
                "attn_cp_size": 1,
                "dp_size": self.dp_size,
                "pp_size": 1,
                "page_size": 4,
                "kv_cache_dtype": "auto",
                "follow_bootstrap_room": False,
            }
        elif self.rank_port:
            answer = {"rank_ip": HOST, "rank_port": self.rank_port}
        else:
            return SimpleNamespace(status_code=404, text="no such rank")
        return SimpleNamespace(status_code=200, json=lambda: answer)

    def post(self, url: str, json: Any, timeout: float) -> Any:
        self._ask(url)
        known = {
            str(r): self.rooms[str(r)] for r in json["bootstrap_rooms"] if str(r) in self.rooms
        }
        return SimpleNamespace(status_code=200, json=lambda: known)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(requests, "get", made.get)
    monkeypatch.setattr(requests, "post", made.post)
    return made


class Decode:
    """The queue of a decode rank; what needs an engine is left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.registered: list[int] = []
        self.manager = manager = bare.decode("nixl")
        manager.kv_args.page_size, manager.kv_args.engine_rank = 4, 0
        manager.server_args.kv_cache_dtype = "auto"
        manager.server_args.disaggregation_transfer_backend = "nixl"
        manager.__dict__.update(
            enable_all_cp_ranks_for_transfer=False, enable_staging=False, waiting_timeout=300
        )
        manager.servers.connections._clock = lambda: self.now
        self.queue: Any = DecodePreallocQueue.__new__(DecodePreallocQueue)
        self.queue.__dict__.update(
            queue=[],
            pending_reqs=[],
            kv_manager=manager,
            max_total_num_tokens=100,
            transfer_backend=TransferBackend.NIXL,
            tree_cache=SimpleNamespace(serves_decode=True),
            scheduler=SimpleNamespace(server_args=manager.server_args),
            clock=lambda: self.now,
            _ensure_retry_count={},
            _ensure_last_attempt_time={},
            _ensure_retry_interval=1.0,
            _max_ensure_retries=15,
        )

        def register(receiver: Any) -> None:
            self.registered.extend(info["rank_port"] for info in receiver.bootstrap_infos)

        monkeypatch.setattr(conn.NixlKVReceiver, "_register_kv_args", register)

    def request(self, room: int, dp_rank: int | None = None, host: str = HOST) -> Any:
        """A request arrives; its receiver."""
        req = SimpleNamespace(
            rid=f"r{room}",
            bootstrap_host=host,
            bootstrap_port=PORT,
            bootstrap_room=room,
            disagg_prefill_dp_rank=dp_rank,
            origin_input_ids=[1],
        )
        self.queue.add(req)
        return self.queue.queue[-1].kv_receiver

    def step(self) -> None:
        """What every step of the scheduler does about connections."""
        self.now += 0.1
        self.queue._resolve_pending_reqs()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def stepped() -> Any:
            self.step()
            return condition()

        until(stepped, what)


@pytest.fixture
def decode(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    made = Decode(monkeypatch)
    yield made
    network.gate.set()
    made.manager.servers._pool.shutdown()  # or its threads ask the network of the next test


def is_ready(receiver: Any) -> bool:
    return bool(receiver.poll() == KVPoll.WaitingForInput)


@pytest.mark.parametrize("dp_rank", [None, 1])
def test_nothing_is_asked_on_the_schedulers_thread(
    network: Network, decode: Decode, dp_rank: int | None
) -> None:
    """Topology, data-parallel rank and addresses of the ranks are three HTTP requests, of which
    SGLang makes each in a step of its scheduler."""
    network.dp_size, network.rooms["7"] = 2, 1
    receiver = decode.request(7, dp_rank)
    decode.until(lambda: is_ready(receiver), "connected")
    assert network.blocking == [] and decode.registered == [4000]
    assert any("query_dp_ranks" in url for url in network.asked) == (dp_rank is None)
    before = len(network.asked)
    assert is_ready(decode.request(8, 1)), "connected: at once, and without a question"
    assert len(network.asked) == before and decode.queue.pending_reqs == []


@pytest.mark.parametrize(
    "hangs", ["pd_capabilities", "prefill_dp_rank=-1", "dp_rank=1&", "query_dp"]
)
def test_a_server_that_hangs(network: Network, decode: Decode, hangs: str) -> None:
    """Guards against steps that take as long as a question, against asking anew in each of them,
    and against a request that waits for ever."""
    network.dp_size, network.rooms["7"], network.hangs = 2, 1, hangs
    receiver = decode.request(7)
    decode.until(lambda: any(hangs in url for url in network.asked), "asked")
    for _ in range(50):
        decode.step()
    assert len([url for url in network.asked if hangs in url]) == 1
    assert network.blocking == [] and not is_ready(receiver)
    decode.now += 300
    decode.step()
    assert receiver.poll() == KVPoll.Failed and decode.queue.pending_reqs == []
    reason = decode.manager.failure_records[7]
    assert ADDRESS in reason and "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in reason
    network.gate.set()
    late = decode.request(8, 1)
    decode.until(lambda: is_ready(late), "the next request connects when it answers again")


@pytest.mark.parametrize("ends", ["client went away", "late answer", "gave up"])
def test_nothing_is_kept_of_a_server_that_nobody_asks_for(
    network: Network, decode: Decode, ends: str
) -> None:
    """Guards against an entry for each address that a client has ever named."""
    servers = decode.manager.servers
    network.refuses = ends != "late answer"
    network.hangs = "" if network.refuses else "pd_capabilities"
    receivers = [decode.request(number, host=f"10.9.9.{number}") for number in range(3)]
    if ends == "gave up":
        decode.until(lambda: decode.queue.pending_reqs == [], "given up")
        assert {receiver.poll() for receiver in receivers} == {KVPoll.Failed}
        assert "10.9.9.2:8998 could not be reached" in decode.manager.failure_records[2]
    decode.until(lambda: len(network.asked) >= 3, "asked")
    decode.queue.pending_reqs.clear()
    network.gate.set()
    decode.until(lambda: not servers._asked and not servers.refusals, "forgotten")


def test_an_answer_for_a_client_that_left_is_not_the_next_ones(
    network: Network, decode: Decode
) -> None:
    """Guards against a request that fails by what a server answered long ago, and against an entry
    for each data-parallel rank that a client has named."""
    network.rank_port = 0  # no such rank, yet
    decode.request(7, 0)
    decode.until(lambda: any("dp_rank=0&" in url for url in network.asked), "asked")
    decode.queue.pending_reqs.clear()
    connections = decode.manager.servers.connections
    decode.until(lambda: not connections._ranks, "forgotten")
    network.rank_port = 4000
    late = decode.request(8, 0)
    decode.until(lambda: late.poll() != KVPoll.Bootstrapping, "decided")
    assert is_ready(late), decode.manager.failure_records.get(8)


def test_a_rank_that_prefill_never_names(network: Network, decode: Decode) -> None:
    """The router sent the other half of the request to nobody. Guards against a request that waits
    for its data-parallel rank for ever."""
    network.dp_size = 2
    receiver = decode.request(7)
    decode.until(lambda: any("query_dp" in url for url in network.asked), "asked")
    decode.now += 300
    decode.until(lambda: receiver.conclude_state is not None, "failed")
    assert receiver.poll() == KVPoll.Failed
    assert "data-parallel rank" in decode.manager.failure_records[7]


class AtOnce:
    """Answers every question before the next line, so that no step overtakes an answer."""

    def shutdown(self) -> None: ...

    @staticmethod
    def submit(address: str, ask: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(ask(*arguments))
        return future


def test_a_rank_that_is_not_named_is_asked_for_more_and_more_rarely(
    network: Network, decode: Decode
) -> None:
    """Guards against a server that is asked in every step for minutes, and against a request whose
    rank is known and that waits for one whose is not."""
    network.dp_size, decode.manager.waiting_timeout = 2, 10**6
    servers = decode.manager.servers
    servers._pool.shutdown()
    servers._pool = servers.connections._pool = AtOnce()
    decode.request(7)
    for _ in range(2000):  # 200 s
        decode.step()
    assert 0 < len(network.asked) < 260
    network.rooms["8"] = 1
    late = decode.request(8)
    for _ in range(6):  # no time passes
        decode.queue._resolve_pending_reqs()
    assert is_ready(late), "asked for at once"
    assert [entry.req.bootstrap_room for entry in decode.queue.pending_reqs] == [7]


@pytest.mark.parametrize("lost", ["connected", "while it is asked"])
def test_a_prefill_server_that_was_restarted(network: Network, decode: Decode, lost: str) -> None:
    """Guards against the addresses of ranks that are gone being used for the server after them; and
    against requests whose rank the router names, which SGLang takes for one that is connected:
    they failed for ever where no other request looked for the server."""
    network.dp_size = 2
    if lost == "while it is asked":
        network.hangs = "prefill_dp_rank=1"
    before = decode.request(6, 1)
    if lost == "connected":
        decode.until(lambda: is_ready(before), "connected")
    else:
        decode.until(lambda: any("prefill_dp_rank=1" in url for url in network.asked), "asked")
    decode.manager.servers.lost(ADDRESS, True, "restarted")
    assert before.poll() == KVPoll.Failed
    network.gate.set()
    network.hangs, network.rank_port = "", 5000
    receiver = decode.request(7, 1)
    decode.until(lambda: receiver.poll() != KVPoll.Bootstrapping, "decided")
    assert is_ready(receiver), decode.manager.failure_records.get(7)
    assert decode.registered[-1] == 5000


def test_a_rank_that_does_not_exist(network: Network, decode: Decode) -> None:
    """Guards against a request that waits where the server says that it has no such rank."""
    network.rank_port = 0
    receiver = decode.request(7, 0)
    decode.until(lambda: receiver.poll() == KVPoll.Failed, "failed")
    assert "Could not fetch bootstrap info" in decode.manager.failure_records[7]
    network.rank_port = 4000
    again = decode.request(8, 0)
    decode.until(lambda: is_ready(again), "asked anew for the next request")


def test_a_server_that_cannot_be_reached(network: Network, decode: Decode) -> None:
    """Guards against more or fewer than SGLang's number of attempts, a second apart, and against
    their count being kept for a later request."""
    network.refuses = True
    for room in (7, 8):
        network.asked.clear()
        receiver = decode.request(room)
        began = decode.now
        decode.until(lambda made=receiver: made.poll() == KVPoll.Failed, "failed")
        assert len(network.asked) == 15 and decode.now - began > 13
        assert "could not be reached" in decode.manager.failure_records[room]
    assert network.blocking == [] and decode.queue.pending_reqs == []


def test_an_aborted_request_is_not_initialised(network: Network, decode: Decode) -> None:
    """Guards against a request that its client gave up and that connects all the same."""
    network.hangs = "pd_capabilities"
    receiver = decode.request(7)
    decode.step()
    receiver.abort()
    network.gate.set()
    decode.until(lambda: not decode.queue.pending_reqs, "dropped")
    assert receiver.poll() == KVPoll.Failed and decode.registered == []

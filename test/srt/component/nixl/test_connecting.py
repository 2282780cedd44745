"""New connections to prefill servers, and the results on decode: SGLang's own classes over a
scripted network. Background queries are answered when a test's step ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import requests
import zmq

from component.transfer import bare
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode import prefill_servers
from sglang.srt.disaggregation.delta.decode.prefill_servers import Connections
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend

HOST, PORT = "10.0.0.1", 8998
ADDRESS = f"{HOST}:{PORT}"
TOPOLOGY = {
    "attn_tp_size": 1, "attn_cp_size": 1, "pp_size": 1, "page_size": 4, "kv_cache_dtype": "auto",
    "follow_bootstrap_room": False,
}  # fmt: skip


class Hangs(BaseException):
    """Raised in place of an answer that never comes."""


class Network:
    """HTTP of prefill's bootstrap servers; and the pool that queries them in the background."""

    def __init__(self) -> None:
        self.is_step = False
        #: Queries on the scheduler's thread; there must be none.
        self.blocking: list[str] = []
        self.asked: list[str] = []
        self.dp_size = 1
        self.rank_port = 4000
        #: Reported capabilities; None for a stock server, which has no such route.
        self.says: wire.Capabilities | None = None
        #: Room -> data-parallel rank, as far as prefill knows it.
        self.rooms: dict[str, int] = {}
        self.refuses = False
        #: Queries with this text are not answered.
        self.hangs = ""
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._hanging: list[Future[Any]] = []

    def submit(self, address: str, ask: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self._jobs.append((Future(), partial(ask, *arguments)))
        return self._jobs[-1][0]

    def answer(self) -> None:
        """Answer all submitted queries except hanging ones."""
        for future, ask in [
            job for job in self._jobs if not self.hangs or job[0] not in self._hanging
        ]:
            try:
                future.set_result(ask())
            except Hangs:
                self._hanging.append(future)
        self._jobs = [job for job in self._jobs if not job[0].done()]

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.is_step:
            self.blocking.append(what)
        if self.hangs and self.hangs in what:
            raise Hangs
        if self.refuses:
            raise requests.ConnectionError

    def get(self, url: str, timeout: float, **_: Any) -> Any:
        self._ask(url)
        answer: Any = {"rank_ip": HOST, "rank_port": self.rank_port}
        if "pd_capabilities" in url:
            answer = self.says
        elif "prefill_dp_rank=-1" in url:
            answer = {**TOPOLOGY, "dp_size": self.dp_size}
        elif not self.rank_port:
            answer = None
        content = msgspec.json.encode(answer)
        status = 404 if answer is None else 200
        return SimpleNamespace(
            status_code=status, text="", content=content, json=lambda: msgspec.json.decode(content)
        )

    def post(self, url: str, json: Any, timeout: float) -> Any:
        self._ask(url)
        rooms = map(str, json["bootstrap_rooms"])
        known = {room: self.rooms[room] for room in rooms if room in self.rooms}
        return SimpleNamespace(status_code=200, json=lambda: known)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(requests, "get", made.get)
    monkeypatch.setattr(requests, "post", made.post)
    monkeypatch.setattr(prefill_servers, "AddressPool", lambda name: made)
    return made


class Decode:
    """The queue of a decode rank, without the parts that need an engine."""

    def __init__(self, network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
        self._network, self.now = network, 1000.0
        clocked = partial(Connections, clock=lambda: self.now)
        monkeypatch.setattr(prefill_servers, "Connections", clocked)
        self.registered: list[int] = []
        self.manager = manager = bare.decode("nixl")
        manager.kv_args.page_size, manager.kv_args.engine_rank = 4, 0
        manager.server_args.__dict__.update(
            kv_cache_dtype="auto", disaggregation_transfer_backend="nixl",
            speculative_algorithm=None,
        )  # fmt: skip
        manager.waiting_timeout = 300
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
        """Add a request; return its receiver."""
        req = SimpleNamespace(
            rid=f"r{room}", bootstrap_host=host, bootstrap_port=PORT, bootstrap_room=room,
            disagg_prefill_dp_rank=dp_rank, origin_input_ids=[1],
        )  # fmt: skip
        self.queue.add(req)
        return self.queue.queue[-1].kv_receiver

    def steps(self, count: int = 6, seconds: float = 0.1) -> None:
        """Run scheduler steps, as far as connections are concerned; answer queries after each."""
        for _ in range(count):
            self.now += seconds
            self._network.is_step = True
            self.queue._resolve_pending_reqs()
            self._network.is_step = False
            self._network.answer()

    def why(self, room: int) -> str:
        """Return the error of a failed room."""
        text: str = self.manager.failure_records[room]
        return text


@pytest.fixture
def decode(network: Network, monkeypatch: pytest.MonkeyPatch) -> Decode:
    return Decode(network, monkeypatch)


def is_ready(receiver: Any) -> bool:
    return bool(receiver.poll() == KVPoll.WaitingForInput)


# ---- queries before a room can be announced ----


@pytest.mark.parametrize("dp_rank", [None, 1])
def test_nothing_is_asked_on_the_schedulers_thread(
    network: Network, decode: Decode, dp_rank: int | None
) -> None:
    """Guards against HTTP requests in a step of the scheduler: SGLang makes three of them there,
    for topology, data-parallel rank and addresses of the ranks."""
    network.dp_size, network.rooms["7"] = 2, 1
    receiver = decode.request(7, dp_rank)
    decode.steps()
    assert is_ready(receiver) and network.blocking == [] and decode.registered == [4000]
    assert any("query_dp_ranks" in url for url in network.asked) == (dp_rank is None)
    before = len(network.asked)
    assert is_ready(decode.request(8, 1)), "already connected: ready at once, without a query"
    assert len(network.asked) == before and decode.queue.pending_reqs == []


@pytest.mark.parametrize(
    "hangs", ["pd_capabilities", "prefill_dp_rank=-1", "dp_rank=1&", "query_dp"]
)
def test_a_server_that_hangs(network: Network, decode: Decode, hangs: str) -> None:
    """Guards against steps that take as long as a query, against a new query in each step, and
    against a request that waits for ever."""
    network.dp_size, network.rooms["7"], network.hangs = 2, 1, hangs
    receiver = decode.request(7)
    decode.steps(50)
    assert len([url for url in network.asked if hangs in url]) == 1
    assert network.blocking == [] and not is_ready(receiver)
    decode.steps(1, seconds=300)
    assert receiver.poll() == KVPoll.Failed and decode.queue.pending_reqs == []
    assert ADDRESS in decode.why(7) and "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in decode.why(7)
    network.hangs = ""
    late = decode.request(8, 1)
    decode.steps()
    assert is_ready(late), "the next request connects when it answers again"


@pytest.mark.parametrize("ends", ["client went away", "late answer", "gave up"])
def test_nothing_is_kept_of_a_server_that_nobody_asks_for(
    network: Network, decode: Decode, ends: str
) -> None:
    """Guards against entries that stay for each address that a client has ever named."""
    servers, hosts = decode.manager.servers, [f"10.9.9.{number}" for number in range(3)]
    network.refuses = ends != "late answer"
    network.hangs = "" if network.refuses else "pd_capabilities"
    receivers = [decode.request(number, host=host) for number, host in enumerate(hosts)]
    decode.steps(300 if ends == "gave up" else 2)
    if ends == "gave up":
        assert {receiver.poll() for receiver in receivers} == {KVPoll.Failed}
        assert decode.queue.pending_reqs == []
        assert "10.9.9.2:8998 could not be reached" in decode.why(2)
    decode.queue.pending_reqs.clear()
    network.hangs = ""
    decode.steps()
    assert not any(servers.connections.is_asking(f"{host}:{PORT}") for host in hosts)
    assert not servers.connections.refusals


def test_a_rank_that_is_not_named(network: Network, decode: Decode) -> None:
    """Guards against a server that is queried in every step for minutes, because the router sent
    the request's other half to no prefill rank; against a request with a known rank that waits for
    one without; and against a request that waits for its data-parallel rank for ever."""
    network.dp_size = 2
    receiver = decode.request(7)
    decode.steps(2000)  # 200 s
    assert 0 < len(network.asked) < 260
    network.rooms["8"] = 1
    late = decode.request(8)
    decode.steps(6, seconds=0.0)
    assert is_ready(late), "queried at once"
    assert [entry.req.bootstrap_room for entry in decode.queue.pending_reqs] == [7]
    decode.steps(1, seconds=300)
    assert receiver.poll() == KVPoll.Failed and "data-parallel rank" in decode.why(7)


@pytest.mark.parametrize("lost", ["connected", "while it is asked"])
def test_a_prefill_server_that_was_restarted(network: Network, decode: Decode, lost: str) -> None:
    """Guards against the use of a previous server's rank addresses after a restart, and against
    requests with a rank named by the router: SGLang assumes that rank to be connected, and such
    requests failed for ever unless another request looked the server up."""
    network.dp_size = 2
    network.hangs = "prefill_dp_rank=1" if lost == "while it is asked" else ""
    before = decode.request(6, 1)
    decode.steps()
    assert is_ready(before) == (lost == "connected")
    decode.manager.servers.lost(ADDRESS, True, "restarted")
    assert before.poll() == KVPoll.Failed
    network.hangs, network.rank_port = "", 5000
    receiver = decode.request(7, 1)
    decode.steps()
    assert is_ready(receiver), decode.manager.failure_records
    assert decode.registered[-1] == 5000


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_does_not_exist(network: Network, decode: Decode, left: bool) -> None:
    """Guards against a request that waits although the server has no such rank, and against a
    request that fails by the answer to a client that ``left`` long ago."""
    network.rank_port = 0
    receiver = decode.request(7, 0)
    decode.steps(2)
    assert any("dp_rank=0&" in url for url in network.asked)
    if left:
        decode.queue.pending_reqs.clear()
    decode.steps()
    if not left:
        assert receiver.poll() == KVPoll.Failed
        assert "Could not fetch bootstrap info" in decode.why(7)
    network.rank_port = 4000
    late = decode.request(8, 0)
    decode.steps()
    assert is_ready(late), decode.manager.failure_records


def test_a_server_that_cannot_be_reached(network: Network, decode: Decode) -> None:
    """Guards against another number of attempts than SGLang's, a second apart, and against a count
    that is kept for a later request."""
    network.refuses = True
    for room in (7, 8):
        network.asked.clear()
        receiver = decode.request(room)
        decode.steps(130)
        assert receiver.poll() == KVPoll.Bootstrapping, "after thirteen seconds"
        decode.steps(70)
        assert receiver.poll() == KVPoll.Failed and len(network.asked) == 15
        assert "could not be reached" in decode.why(room)
    assert network.blocking == [] and decode.queue.pending_reqs == []


def test_an_aborted_request_is_not_initialised(network: Network, decode: Decode) -> None:
    """Guards against an aborted request that still connects."""
    network.hangs = "pd_capabilities"
    receiver = decode.request(7)
    decode.steps()
    receiver.abort()
    network.hangs = ""
    decode.steps()
    assert receiver.poll() == KVPoll.Failed and decode.registered == []
    assert decode.queue.pending_reqs == []


# ---- capabilities of the server ----


@pytest.mark.hazard("peer-ignores-prefix")
def test_asked_until_it_answers_and_after_it_was_lost(network: Network, decode: Decode) -> None:
    """Guards against a prefill server that is just starting and counts as stock for ever, and
    against a prefix for a stock server that replaced a patched one at its address."""
    network.refuses, network.says = True, wire.OURS
    receiver, manager = decode.request(7, 0), decode.manager
    decode.steps()
    assert not is_ready(receiver) and not manager.peer_takes_delta(ADDRESS)
    network.refuses = False
    decode.steps(20)
    assert is_ready(receiver) and manager.peer_takes_delta(ADDRESS)
    assert not manager.peer_takes_delta("10.0.0.9:1")
    manager.servers.lost(ADDRESS, True, "restarted")
    network.says = None
    again = decode.request(8, 0)
    decode.steps()
    assert is_ready(again) and not manager.peer_takes_delta(ADDRESS)


def test_without_the_flag_it_is_asked_what_stock_asks(network: Network, decode: Decode) -> None:
    """Guards against queries that stock decode would not make."""
    manager = decode.manager
    manager.server_args.disaggregation_decode_enable_radix_cache = False
    del manager.servers
    manager.start_delta(DisaggregationMode.DECODE, manager.server_args)
    assert manager.try_ensure_parallel_info(ADDRESS) and not manager.peer_takes_delta(ADDRESS)
    assert not any("pd_capabilities" in url for url in network.asked)


@pytest.mark.parametrize(
    ("theirs", "ours", "warned"),
    [("none", "EAGLE", 1), ("EAGLE", "EAGLE", 0), (None, "EAGLE", 0), ("none", None, 0)],
)
def test_prompts_without_draft_kv_are_said_once(
    network: Network,
    decode: Decode,
    caplog: pytest.LogCaptureFixture,
    theirs: str | None,
    ours: str | None,
    warned: int,
) -> None:
    """Guards against drafts that are rejected behind every prompt without a log line with the
    reason, and against a line for each handshake."""
    network.says = msgspec.structs.replace(wire.OURS, incarnation="a", speculative=theirs)
    decode.manager.server_args.speculative_algorithm = ours
    for room in (7, 8):
        decode.request(room, 0)
        decode.steps()
        decode.manager.servers.disconnect(ADDRESS)
    assert caplog.text.count("prompts arrive without draft KV") == warned


def test_a_draft_behind_the_target() -> None:
    """Guards against values in the draft model's buffers if decode has a draft with as many layers
    as the target and prefill has none: stock assumes pipeline stages."""
    made = bare.prefill("nixl")
    made.kv_args.prefill_start_layer = 0
    ours, theirs = [1, 2, 3, 4], [11, 12, 13, 14, 21, 22, 23, 24]
    assert made.get_mha_kv_ptrs_with_pp(ours, theirs) == ([1, 2], [3, 4], [11, 12], [13, 14], 2)
    made.pp_size = 2
    *_, values, layers = made.get_mha_kv_ptrs_with_pp(ours, theirs)
    assert (values, layers) == ([21, 22], 2)


@pytest.mark.parametrize("flag", [False, True])
def test_sockets_are_bounded_as_in_stock_without_the_flag(
    flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against queues that grow without limit if no thread checks whether the peer is alive,
    and against a scheduler that waits for a dead peer if one does."""
    monkeypatch.setattr(CommonKVReceiver, "drops_dead_sockets", False)
    monkeypatch.setattr(CommonKVReceiver, "_socket_cache", {})
    manager = bare.without_engine(conn.NixlKVManager)
    manager.server_args.disaggregation_decode_enable_radix_cache = flag
    manager.start_delta(DisaggregationMode.DECODE, manager.server_args)
    made, _ = CommonKVReceiver._connect("tcp://127.0.0.1:9")
    assert (made.getsockopt(zmq.SNDHWM) == 0) == flag
    made.close(linger=0)


@pytest.mark.hazard("late-word-revives-room")
@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (conn.NixlKVManager, KVPoll.Failed),
        # The manager of a backend that this patch set does not change.
        (CommonKVManager, KVPoll.Success),
    ],
)
def test_a_room_that_failed(kind: Any, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a late message that revives a failed room, and against changed behaviour, or a
    need for the package's variables, in another backend of SGLang."""
    if kind is CommonKVManager:
        monkeypatch.setenv("SGLANG_DISAGGREGATION_CLAIM_TIMEOUT", "not read here")
    made = bare.without_engine(kind)
    made.start_delta(DisaggregationMode.PREFILL, made.server_args)
    for status in (KVPoll.Transferring, KVPoll.WaitingForInput):
        made.update_status(1, status)
    assert made.request_status == {1: KVPoll.Transferring}
    for status in (KVPoll.Failed, KVPoll.Success):
        made.update_status(1, status)
    assert made.request_status == {1: last}

"""The order in which requests wait, what is due when, and that nothing new costs nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only.prefetch import Prefetch
from sglang.srt.mem_cache.buffer_only.waiting_line import TokensAhead, WaitingLine


def line_of(*rids: str) -> WaitingLine:
    found = WaitingLine()
    for rid in rids:
        found.add(Prefetch(rid, "key"))
    return found


def order(line: WaitingLine) -> list[str]:
    rids = [one.rid for one in line]
    places = [one.place for one in line]
    assert places == sorted(set(places))
    return rids


@given(st.lists(st.permutations("abcdef"), max_size=5), st.sets(st.sampled_from("abcdef")))
def test_it_follows_the_schedulers_queue(queues: list[list[str]], without: set[str]):
    """Whatever that does; requests without a prefetch are nobody's business."""
    line = line_of(*sorted(set("abcdef") - without))
    for queue in queues:
        before = order(line)
        gone, moved = line.arrange(list(queue))
        expected = [rid for rid in queue if rid not in without]
        assert not gone and moved is (before != expected) and order(line) == expected


def test_who_left_the_queue():
    """They are told once as gone, wherever they stood; nobody else moves, and one that comes
    behind all others later stands there."""
    line = line_of("a", "b", "c")
    (gone,), moved = line.arrange(["a", "c"])
    assert gone.rid == "b" and not moved
    line.remove(gone)
    assert line.arrange(["a", "c"]) == ([], False)
    line.add(Prefetch("d", "key"))
    assert line.arrange(["a", "c", "d"]) == ([], False) and order(line) == ["a", "c", "d"]
    (gone,), moved = line.arrange(["d", "a"])
    assert gone.rid == "c" and moved and order(line) == ["d", "a", "c"]


def test_what_is_due():
    """At its time, once for each time; not for one that has left, or whose request asks again."""
    line = line_of("a", "b", "c")
    a, b, c = line
    for prefetch, at_ms in [(a, 30), (b, 10), (c, 10), (a, 20)]:
        line.wake(prefetch, at_ms)
    line.remove(c)
    line.add(Prefetch("c", "key"))
    assert [line.due(now_ms) for now_ms in (9, 10, 25, 30, 99)] == [[], [b], [a], [a], []]


def test_tokens_ahead():
    """Of each the prompt behind its hit, summed once for all that ask."""
    line = WaitingLine()
    for rid, tokens, end in [("a", 10, 1), ("b", 20, 0), ("c", 5, 1), ("d", 7, 0)]:
        line.add(Prefetch(rid, "t" * tokens, begin=end))
    ahead = TokensAhead(line, page_size=4)
    a, _, c, d = line
    assert (ahead.of(a), ahead.of(c), ahead.of(c), ahead.of(d)) == (0, 26, 26, 27)

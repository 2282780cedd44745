"""When a store is asked."""

from __future__ import annotations

from sglang.srt.mem_cache.buffer_only.circuit_breaker import Health


def probes(health: Health, until: float) -> list[float]:
    """When a probe is due, with a look every half second."""
    times = [number / 2 for number in range(int(until * 2))]
    return [now for now in times if health.claim_probe(now)]


def test_probes_come_at_growing_intervals() -> None:
    """Guards against a dead store that is asked over and over, and against one that is never asked
    again, also when no probe is ever answered."""
    health = Health(1.0, 8.0)
    assert probes(health, 5.0) == []
    assert health.hung(10.0)
    assert not health.up
    assert probes(health, 60.0) == [11.0, 13.0, 17.0, 25.0, 33.0, 41.0, 49.0, 57.0]


def test_an_answer_makes_it_up_again() -> None:
    """Guards against a store that stays down though it answers."""
    health = Health(1.0, 8.0)
    health.hung(0.0)
    assert health.claim_probe(1.0)
    health.answered()
    assert health.up
    assert not health.claim_probe(100.0)


def test_a_store_that_answers_probes_only_is_asked_less_and_less() -> None:
    """Guards against a deadline a second, for a store whose look-ups work and whose reads hang."""
    health = Health(1.0, 8.0)
    now, waits = 0.0, []
    for _ in range(5):
        health.hung(now)
        waits.append(health.retry_in)
        now += health.retry_in
        assert health.claim_probe(now)
        health.answered()
    assert waits == [1.0, 4.0, 8.0, 8.0, 8.0]


def test_a_call_that_works_ends_the_outage() -> None:
    """Guards against long waits for a store that hangs once a day."""
    health = Health(1.0, 8.0)
    for _ in range(4):
        health.hung(0.0)
        assert health.claim_probe(100.0)
        health.answered()
    health.worked()
    health.hung(0.0)
    assert health.retry_in == 1.0


def test_calls_that_hang_together_are_one_outage() -> None:
    """Guards against an interval that grows with the number of threads, and a message for each."""
    health = Health(1.0, 8.0)
    assert health.hung(0.0)
    assert not health.hung(0.5)
    health.worked()  # a late answer of another call does not make it up
    assert not health.up
    assert health.retry_in == 1.0

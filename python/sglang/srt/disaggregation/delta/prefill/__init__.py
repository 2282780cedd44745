"""Prefill: rooms and their transfers on worker threads; the scheduler only appends to a queue.

Life of a room, on one worker from beginning to end::

    open -> submit ... submit(is_last) -> deliver -> forget
                                       \\-> room_failed -^
            cancel ------------------------------------^

A room ends once: with its last chunk, its first failure, ``cancel`` or ``forget``. Nothing of an
ended room is posted. The worker queries the room table before every post (``enter``) and calls
``leave`` when all posted transfers of a room have settled; only the worker posts and sees transfers
settle. So a room that another thread gives up is *drained* at once if no write is under way, and
otherwise by the worker's ``leave``.

Isolation: at most ``window`` transfers are under way on a worker and ``quota`` to a peer. Chunks
for a peer whose quota is used up delay no other peer. A transfer that misses its deadline fails its
room, leaves the window and is polled five times a second until it settles, for ever if necessary,
because a write cannot be cancelled. It keeps its place in its peer's quota, so that a peer that
never answers takes a bounded number of transfers. One place is always left, and a later transfer
that is delivered frees the others.
"""

"""Prefill: rooms, and their transfers on worker threads; the scheduler only appends to a queue.

Life of a room, on one worker from beginning to end::

    open -> submit ... submit(is_last) -> deliver -> forget
                                       \\-> room_failed -^
            cancel ------------------------------------^

A room ends once, and nothing brings it back: with its last chunk, with its first failure, or by
one of ``cancel`` and ``forget``. From then on nothing of it is posted. The worker asks the room
table before every post (``enter``) and calls ``leave`` whenever nothing that was posted for a
room is under way any more: it alone posts, and it alone sees transfers settle. So a room
that another thread gives up is *drained* at once if nothing of it is under way, and otherwise by
the worker's ``leave``.

Isolation: at most ``window`` transfers are under way on a worker and ``quota`` for a peer. What
waits for a peer whose quota is used up holds up nobody else. A transfer that misses its deadline
fails its room, leaves the window and is polled five times a second until it settles, for ever if
need be: it cannot be taken back. It keeps its place in the quota of its peer, so that a peer that
never answers can tie up only so much; but one place is always left to try, and a later transfer
that is delivered frees the others.
"""

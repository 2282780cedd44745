"""Transfers on worker threads, for any backend: the scheduler only appends to a queue.

``chunk``       what is queued: immutable
``interfaces``  what it is attached to: a backend, a gate, an observer
``settings``    queues, threads, windows; which worker has a room
``pool``        the threads, and what the rest of the process calls
``worker``      the state machine of one thread, driven by ``step(now)``
``parcels``, ``lanes``, ``deadlines``, ``pace``, ``graveyard``
                its parts: records, who is next, what is due, when to look again, what never settled
``tickets``     what the scheduler sees of a room
``background``  threads that take no core from the scheduler
``watchdog``    workers that do not go on fail their rooms
``stats``, ``histogram``
                numbers for Prometheus and for one log line a minute

Life of a room, on one worker from beginning to end::

    open -> submit ... submit(is_last) -> chunk_done for each -> room_quiet -> forget
                                       \\-> room_failed ----------^
            cancel --------------------------------------------^

A room ends once, and nothing brings it back: with its last chunk, with its first failure, or by
one of ``cancel`` and ``forget``. From then on nothing of it is posted. It is *quiet* when what was
posted before has settled, and only the worker can know: it alone posts, and it alone sees handles
settle. ``gate.enter`` is asked before every post, and ``gate.leave`` is called whenever nothing
that was posted under a room number is under way any more. So a room that is stopped at the gate by
another thread is quiet at once if nothing of it is under way, and otherwise by the worker's
``leave``; and a number that is used again while an old transfer lingers is not left before that
one has settled.

Isolation: at most ``window`` transfers are under way on a worker and ``quota`` for a peer. What
waits for a peer whose quota is used up holds up nobody else. A transfer that misses its deadline
fails its room, leaves the window and is looked at five times a second until it settles, for ever if
need be: it cannot be taken back. It keeps its place in the quota of its peer, so that a peer that
never answers can tie up only so much; but one place is always left to try, and a later transfer
that is delivered frees the others.
"""

"""What a prefill and a decode server share to move only the pages that decode lacks (sglang#19746).

Both sides:

``pages``, ``heads``   arithmetic of pages and KV heads, the send cursor, the delta plan: pure
``wire``               the versioned frame that carries ``decode_prefix_len`` from decode to prefill
``capability``         how decode learns that a prefill server understands that frame
``control``            what the sides tell each other beside a transfer; ``sockets`` carries it
``reader``             reads what peers send, so that no message can do harm; ``complaints`` logs it
``common``, ``endpoints``
                       the thin overrides of SGLang's manager and bootstrap server, sender and
                       receiver
``deadlines``, ``env`` how long each side waits for the other
``failures``           why rooms fail
``ranks``              the one collective
``stats``              counters beside the connector, for Prometheus and for tests
``events``             an optional event log, a JSON line for each event
``accounting``         what is counted and logged of a room; ``harmless`` keeps its errors away

Prefill:

``gate``               which rooms may still be written for, complete or given up
``prefill_rooms``      who announced a room, and who is told when it ends early
``listeners``          decode ranks that never ping
``prefill``, ``prefill_ends``, ``scheduler``
                       the thin overrides of the prefill scheduler
``scheduler_time``     time in which the scheduler takes its turns

Decode:

``prefill_servers``    who they are, whether they live, what they stopped
``connections``        what is asked of them in the background
``heartbeat``          whether they are alive
``watch``              a room that was given up, until nothing writes to its pages
"""

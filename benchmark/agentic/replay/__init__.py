"""Sends a trace to a server or a router, streams the answers, and measures both sides.

classes   WARM, MEDIUM, HEAVY: a request by the tokens that it needs prefilled
outcome   what became of one request: one line of the output file
plan      which request of the trace goes out when, and after which other one
prepare   request bodies, made ahead by a process of their own
send      one request: the stream, the time of each token, errors by kind
clock     the replay's time, and how late this process's event loop runs
run       the replay itself; ``replay`` is what other programs call
sink      the output file: survives a crash, and can be resumed
report    numbers and tables from outcomes
limits    open files, one or two a stream
cli       ``python -m benchmark.agentic replay``
"""

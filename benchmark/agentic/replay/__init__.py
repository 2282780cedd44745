"""Sends a trace to a server or a router, streams the answers, and measures both sides.

classes   WARM, MEDIUM, HEAVY: a request by the tokens that it needs prefilled
outcome   what became of one request: one line of the output file
plan      which request of the trace goes out when, and after which other one
prepare   request bodies, made ahead by a process of their own
send      one request: the stream, the time of each token, errors by kind
clock     the replay's time, and how late this process's event loop runs
run       the replay itself; ``replay`` is what other programs call
client    whether this side kept up
limits    open files, one or two a stream
"""

"""A discrete-event simulation of prefill and decode pools, on a plain event heap.

jobs      requests: from a trace, or a closed loop over shared prefixes
pool      one worker's KV: private tokens, and blocks shared by requests, evicted by age
routing   which worker a request goes to: the router's policies
decode    admission, batches, retraction
prefill   chunks, prefix cache
aggregated  a worker that does both
fleet     the workers, links and clock; runs the whole
outcome   what a run was: per request, and as numbers
"""

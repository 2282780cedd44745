"""How many requests a decode pool holds, what a transfer costs, and where the wall stands.

shapes     bytes of KV a token has
costs      what a step, a prefill and a transfer take: measured, with the source of each number
formulas   closed forms: pool, transfer charge, phase isolation, limits of a split
trace      what the closed forms ask of a trace
sim        a discrete-event simulation of prefill and decode pools
calibrate  costs measured on real servers
check      prediction against measurement
published  the same against the upstream pull request's figures
"""

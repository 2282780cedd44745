"""How many requests a decode pool holds, what a transfer costs, and where the wall stands.

costs      what a step, a prefill and a transfer take: measured, with the source of each number
formulas   closed forms: pool, transfer charge, phase isolation, limits of a split
sim        a discrete-event simulation of prefill and decode pools
calibrate  costs from the records of a run
"""

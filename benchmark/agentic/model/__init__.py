"""How many requests a decode pool holds, what a transfer costs, and where the wall stands."""

"""A matrix of real servers under one trace, and one page about it.

load      the trace: sampled, scaled to the machine
arms      what is compared: which servers, behind which router
measure   one arm: fresh servers, the replay, what it moved
findings  sentences from numbers
page      the report, Markdown with tables
plots     its figures
cli       ``python -m benchmark.agentic report``
"""

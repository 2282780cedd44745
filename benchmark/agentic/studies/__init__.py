"""A question, asked of servers: arms under one trace at several loads, in interleaved rounds.

spec      a study's YAML
load      its trace: sampled, scaled to the fleet
run       rounds of all arms, and what is kept of them
record    the run's folder, read and written
numbers   quantities of a load, their ratios, bootstrap intervals
verdict   sentences: which arm is best, by how much, and where each breaks
page      the page, in Markdown and HTML
summary   its numbers, for programs
plots     its figures
cli       ``python -m benchmark.agentic run``, ``report`` and ``compare``
"""

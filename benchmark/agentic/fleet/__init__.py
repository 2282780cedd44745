"""The servers that a study measures, given by address, or started on this machine.

spec      ``fleet.yaml``: roles to URLs, keys, endpoint, sizes
servers   servers by address: target, warm-up, flush, counters, gauges over time
rig       the local CPU rig: starts the servers of an arm
"""

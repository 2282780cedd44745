"""What the demo, the benchmarks and the end-to-end tests share: servers, clients, loads, reports.

ports, process   a server process: ports nobody else takes, a log, a clean end whatever happens
servers, fleet   configuration -> command line; any number of servers as one object
pair             a prefill and a decode server as a fleet
client           one request to both servers at once, or through a load balancer
workload         seeded loads, pure functions
metrics, report  counters between two scrapes; percentiles, JSONL, tables
checks           after a scenario: idle, balanced, nothing leaked
"""

"""Replay agentic traffic against SGLang servers, and see what disaggregation is worth for it.

load       send a trace, measure each request
fleet      the servers that are measured: by address, or started on this machine
router     route to aggregated workers, or to prefill and decode pools, by policy
capacity   how many requests a decode pool holds
studies    a question as a file; measured in interleaved rounds
report     answered on one page
"""

"""Replay agentic traffic against SGLang servers, and see what disaggregation is worth for it.

sample     what a trace holds, and a smaller trace that holds the same
replay     send a trace, measure each request
router     route to colocated workers, or to prefill and decode pools, by policy
capacity   where the decode pool is full: a model, and a simulation of P and D pools
fleet      the servers that are measured: by address, or started on this machine
studies    a question as a file; measured in interleaved rounds, answered on one page
"""

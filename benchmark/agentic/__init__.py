"""Replay agentic traffic against SGLang servers, and measure what disaggregation gains for it.

load       send a trace, and measure each request
fleet      the measured servers: given by address, or started on this machine
router     route to aggregated workers, or to prefill and decode pools, by policy
studies    questions as files, measured in interleaved rounds
report     write the answer as one page
"""

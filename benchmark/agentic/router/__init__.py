"""A router for SGLang servers: colocated workers, or pools of prefill and decode workers.

policies    which worker a request goes to: pure functions
state       what the router believes about one worker, and what each request charges to it
prefixes    which prompts a worker holds, as hashes of their blocks
schedule    candidates, offload and session pins of one request
body        a request's body: what routing reads of it, and the fields that we add
answer      what routing learns from an answer
upstream    connections to workers, and when it is safe to send a request elsewhere
half        a request at one of its workers, given back once
proxy       one request from the client's bytes to the answer's end
health      which workers take part
"""

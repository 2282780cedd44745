"""A router for SGLang servers: colocated workers, or pools of prefill and decode workers."""

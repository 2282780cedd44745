"""A router for SGLang servers: aggregated workers, or pools of prefill and decode workers."""

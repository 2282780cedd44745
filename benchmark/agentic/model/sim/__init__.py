"""A discrete-event simulation of prefill and decode pools, on a plain event heap."""

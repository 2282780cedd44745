"""The main use in one command: a prefill and a decode server, with and without the flags."""

"""The main job in one command: a prefill and a decode server, with and without the flag."""

"""Sends a trace to a server or a router, streams the answers, and measures both sides."""

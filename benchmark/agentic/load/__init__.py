"""Send a trace to a server or a router, stream the answers, and measure client and servers."""

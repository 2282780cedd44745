"""The servers that a study measures: given by URL, or started on this machine."""

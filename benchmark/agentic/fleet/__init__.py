"""The servers that a study measures, given by address, or started on this machine."""

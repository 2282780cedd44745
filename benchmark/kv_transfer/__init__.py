"""What a KV transfer costs, stage by stage: the stock way, ours, and the bare library.

README.md beside this file has the question, the method and the results.
"""

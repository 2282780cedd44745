"""What a KV transfer costs: the stock way and ours.

README.md beside this file has the question, the method and the results.
"""

"""Cost of a KV transfer, in the stock release and with this package.

README.md in this folder has the question, the method and the results.
"""

"""The page of a study: its numbers with their intervals, what they say, tables and figures."""

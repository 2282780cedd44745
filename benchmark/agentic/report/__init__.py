"""The page of a study: numbers with intervals, the verdict, tables and figures."""

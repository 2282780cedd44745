"""What a trace holds, and a smaller trace that holds the same."""

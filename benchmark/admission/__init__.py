"""CPU time of one decode-admission step, ours and the stock queue's (``README.md``)."""

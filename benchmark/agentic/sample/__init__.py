"""What a trace holds, and a smaller trace that holds the same.

columns    session, time and lengths of every request, as arrays
blocks     which blocks are shared by whom, exactly, in bounded memory
survey     one pass over a trace: both of the above
describe   figures of a trace; its command line
window     a contiguous piece of time
thin       fewer sessions, each whole
select     window and thinning, or random sessions, as one plan
table      traces side by side
cli        command line of the sampler
shape      what generated agentic traffic is like
generate   such traffic as a trace; its command line
command    what the command lines share
progress   bars for long work
"""

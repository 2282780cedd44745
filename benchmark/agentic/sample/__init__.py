"""What a trace holds, and a smaller trace that holds the same.

survey     one pass over a trace: requests as arrays, which blocks are shared by whom
describe   figures of a trace; its command line
window     a contiguous piece of time
thin       fewer sessions, each whole
select     window and thinning, or random sessions, as one plan
cli        command line of the sampler
generate   command line of the generator
command    what the command lines share
"""

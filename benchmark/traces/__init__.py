"""Request traces in Mooncake's format (FAST 25): what was asked when, without what was said.

record    one request; what makes a record valid
read      a file of JSON lines, one record at a time
generate  seeded traffic of agents, people or agents with tools, for whoever has no trace
scale     fewer tokens and less time, the sharing kept
prompts   token ids for hash ids: equal blocks are equal tokens
sharing   what an endless cache would hit
sessions  which requests are one conversation, where the trace does not say
"""

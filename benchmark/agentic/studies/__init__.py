"""A question, asked of servers: arms under one trace at several loads, in interleaved rounds."""

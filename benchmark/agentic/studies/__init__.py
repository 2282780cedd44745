"""Studies: a question, answered by running arms under one load at several levels, in rounds."""

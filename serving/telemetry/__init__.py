"""What is told of each request, beside its answer: a line in the log, and a trace."""

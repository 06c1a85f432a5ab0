"""What recall remembers, and how it drafts from that: a table in C or Python, for our engine and for others."""

"""Whether this machine can run the loop, and how well: what ``osd doctor`` looks at."""

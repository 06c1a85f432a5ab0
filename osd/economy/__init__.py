"""What drafting and training are worth: measured by switching drafting off and on, and decided by one planner."""

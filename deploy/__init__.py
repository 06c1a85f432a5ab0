"""Putting the rooms together: the whole loop on one machine, the demo, and what a cluster needs."""

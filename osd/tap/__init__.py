"""The tap: a proxy in front of a server that stays, which captures what is asked and answered."""

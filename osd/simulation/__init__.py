"""A deployment as a simulation of discrete events: what it would write, read, train, save and pay."""

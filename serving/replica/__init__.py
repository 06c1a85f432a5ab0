"""One replica: the engine, the drafter versions that it follows, and its reports."""

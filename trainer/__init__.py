"""Background trainer: reads traces, trains the drafter and publishes candidates that pass the gate."""

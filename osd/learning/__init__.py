"""Learning a drafter from traces: batches, divergences, replay, the distiller, the gate, and drift of acceptance."""

"""The background trainer: follows the traces, distills the drafter, publishes what passes the gate."""

"""Training runs: one worker, from a configuration to its part of the summary."""

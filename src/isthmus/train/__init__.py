"""The roof: whole runs, from a configuration to a summary."""

"""Faults at random moments while a run trains over shaped links: what they cost, and that nothing is lost."""

"""Catching up: a run's state in checked chunks, from those who have it to those who lack it."""

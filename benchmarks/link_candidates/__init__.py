"""Candidates for the link between two workers, each a small whole implementation of the same exchange."""

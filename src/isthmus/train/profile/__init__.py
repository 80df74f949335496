"""`isthmus profile`: what a configuration takes of this machine, and what its syncs cost."""

from isthmus.train.profile.measure import Profile, profile
from isthmus.train.profile.tables import show

__all__ = ["Profile", "profile", "show"]

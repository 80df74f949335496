"""`isthmus profile`: the memory, speed and arithmetic of a configuration on this machine, and what its syncs cost."""

from isthmus.tools.profile.measure import Profile, profile
from isthmus.tools.profile.tables import show

__all__ = ["Profile", "profile", "show"]

"""`isthmus profile`: the memory, speed and arithmetic of a configuration on this machine, and what its syncs cost."""

from isthmus.tools.profile.measure import Profile, profile, show_profile

__all__ = ["Profile", "profile", "show_profile"]

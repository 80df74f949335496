"""isthmus: train one model on clusters joined by slow, unreliable links."""

__version__ = "0.1.0"

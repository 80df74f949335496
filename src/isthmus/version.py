"""The version of isthmus, also where it runs from its source without being installed."""

__version__ = "0.1.0"

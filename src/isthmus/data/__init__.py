"""The data that models are trained on."""

from isthmus.core.registry import Registry
from isthmus.data.base import Corpus, DataSpec, Stream
from isthmus.data.text import Text

DATA = Registry("data", {"text": "isthmus.data.text:Text"})

__all__ = ["DATA", "Corpus", "DataSpec", "Stream", "Text"]

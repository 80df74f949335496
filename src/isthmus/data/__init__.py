"""The data that models are trained on."""

from isthmus.core.registry import Registry
from isthmus.data.base import Corpus, DataSpec, Samples, Stream
from isthmus.data.leased import LeasedStream, LeasesExhausted
from isthmus.data.ledger import Ledger
from isthmus.data.line import LineStream, open_stream
from isthmus.data.text import Text

DATA = Registry(
    "data",
    {
        "text": "isthmus.data.text:Text",
        "images": "isthmus.data.images:Images",
        "speech": "isthmus.data.speech:Speech",
        "huggingface": "isthmus.data.huggingface:HuggingFace",
        "huggingface_images": "isthmus.data.huggingface_images:HuggingFaceImages",
        "huggingface_speech": "isthmus.data.huggingface_speech:HuggingFaceSpeech",
    },
)

__all__ = [
    "DATA",
    "Corpus",
    "DataSpec",
    "LeasedStream",
    "LeasesExhausted",
    "Ledger",
    "LineStream",
    "Samples",
    "Stream",
    "Text",
    "open_stream",
]

"""The data that models are trained on."""

from isthmus.core.registry import Registry
from isthmus.data.base import Batches, DataSet, DataSpec, SampleOrder
from isthmus.data.leased_batches import LeasedBatches, LeasesExhausted
from isthmus.data.ledger import Ledger
from isthmus.data.line import OrderedBatches, open_batches
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
    "DataSet",
    "DataSpec",
    "LeasedBatches",
    "LeasesExhausted",
    "Ledger",
    "OrderedBatches",
    "SampleOrder",
    "Batches",
    "Text",
    "open_batches",
]

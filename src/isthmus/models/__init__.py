"""The models that are trained; they know nothing of other workers."""

from isthmus.core.registry import Registry
from isthmus.models.base import CausalLM, ModelSpec, Module, outline
from isthmus.models.exported import load_exported, save_exported

MODELS = Registry(
    "model",
    {
        "gpt_neox": "isthmus.models.gpt_neox:GPTNeoX",
        "gpt_neo": "isthmus.models.gpt_neo:GPTNeo",
        "wav2vec2": "isthmus.models.wav2vec2:Wav2Vec2",
        "wav2vec2_ctc": "isthmus.models.wav2vec2_ctc:Wav2Vec2CTC",
        "biggan": "isthmus.models.biggan:BigGAN",
        "huggingface": "isthmus.models.huggingface:HuggingFace",
        "resnet": "isthmus.models.resnet:ResNet",
        "module": "isthmus.models.base:Module",
    },
)

__all__ = ["MODELS", "CausalLM", "ModelSpec", "Module", "load_exported", "outline", "save_exported"]

"""The models that are trained. They cannot know that they are trained on islands."""

from isthmus.core.registry import Registry
from isthmus.models.base import CausalLM, ModelSpec, Module

MODELS = Registry(
    "model",
    {
        "gpt_neox": "isthmus.models.gpt_neox:GPTNeoX",
        "gpt_neo": "isthmus.models.gpt_neo:GPTNeo",
        "huggingface": "isthmus.models.huggingface:HuggingFace",
        "resnet": "isthmus.models.resnet:ResNet",
        "module": "isthmus.models.base:Module",
    },
)

__all__ = ["MODELS", "CausalLM", "ModelSpec", "Module"]

"""The models that are trained; they know nothing of other workers."""

from isthmus.models.base import MODELS, ModelSpec, Module, outline
from isthmus.models.causal_lm import CausalLM
from isthmus.models.exported import load_exported, save_exported

__all__ = ["MODELS", "CausalLM", "ModelSpec", "Module", "load_exported", "outline", "save_exported"]

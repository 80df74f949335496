"""One function per method: a paper as an expression of values."""

from isthmus.recipes.attach import attach
from isthmus.recipes.base import RECIPES, Plan, Recipe
from isthmus.recipes.load import load_config

__all__ = ["RECIPES", "Plan", "Recipe", "attach", "load_config"]

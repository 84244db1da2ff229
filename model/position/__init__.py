"""Positional schemes: the door (`base`), the schemes, and the registry."""

from model.position.base import ContentPlan, Geometry, Plan, Position, PositionSettings, Span
from model.position.modifiers import Modifiers, temperature_factors
from model.position.places import Places
from model.position.registry import SCHEMES

__all__ = [
    "SCHEMES",
    "ContentPlan",
    "Geometry",
    "Modifiers",
    "Places",
    "Plan",
    "Position",
    "PositionSettings",
    "Span",
    "temperature_factors",
]

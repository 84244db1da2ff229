"""Positional schemes: the door (`base`), the schemes, and the registry."""

from model.position.base import Geometry, Places, Plan, Position, PositionSettings, Span
from model.position.registry import SCHEMES

__all__ = ["SCHEMES", "Geometry", "Places", "Plan", "Position", "PositionSettings", "Span"]

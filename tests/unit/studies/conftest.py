"""The toy model for every test of the room, and runs that draw nothing unless asked to."""

from tests.tuning import quickly, toy_model

__all__ = ["quickly", "toy_model"]

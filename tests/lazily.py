"""Modules of others that few tests need: every worker of the tests loads every file of them."""

import os
from importlib import import_module
from typing import Any


class Lazily:
    """A module that is loaded when a test first asks for something in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if "PYTEST_CURRENT_TEST" not in os.environ:  # whoever looks for tests asks for marks and the like
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)

"""Base of every recipe section: frozen, unknown keys rejected, rules between keys."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Off = Literal["off"]


class RuleError(ValueError):
    """A broken rule between keys: what is wrong, the keys involved, and the remedy."""

    def __init__(self, what: str, *, keys: tuple[str, ...], remedy: str = "") -> None:
        self.what, self.keys, self.remedy = what, keys, remedy
        super().__init__(what)


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

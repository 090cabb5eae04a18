"""Base of every recipe section: frozen, unknown keys rejected, rules between keys."""

from operator import attrgetter
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Off = Literal["off"]


class RuleError(ValueError):
    """A broken rule between keys: what is wrong, the keys involved, and the remedy."""

    def __init__(self, what: str, *, keys: tuple[str, ...], remedy: str = "") -> None:
        self.what, self.keys, self.remedy = what, keys, remedy
        super().__init__(what)


class Only(NamedTuple):
    """Keys that apply only if another key has one of some values; else they keep their defaults."""

    keys: tuple[str, ...]
    choice: str
    values: tuple[object, ...]


class Section(BaseModel):
    """A part of a recipe, or a whole one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    ONLY: ClassVar[tuple[Only, ...]] = ()
    """Rules between keys of this recipe, by their dotted names."""

    @model_validator(mode="after")
    def chosen_keys_apply(self) -> Self:
        for keys, choice, values in self.ONLY:
            given = attrgetter(choice)(self)
            for name in () if given in values else keys:
                section, _, key = name.rpartition(".")
                owner = attrgetter(section)(self)
                if getattr(owner, key) != type(owner).model_fields[key].default:
                    what = f"{name} applies only to {choice} = {' or '.join(map(str, values))}, not {given}"
                    remedy = f"use `{choice}={values[0]}`, or remove {name}"
                    if values[0] == "off":  # an option such as --minutes has no word for it
                        remedy = f"remove `{choice}` or {name}"
                    raise RuleError(what, keys=(name, choice), remedy=remedy)
        return self

"""Requests: dataclasses with help texts, from which the command line and the Python functions are made.

A field's annotation has its type, its `Option` and, for a key of a recipe, its `Setting`. Verbs that share
options inherit them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from bertsmith.cli.spelling import Setting
from bertsmith.core.errors import UserError
from bertsmith.recipe.toml_text import value_text

Place = Path | str
"""A path; in Python a string, too."""
Places = Place | Sequence[Place]
"""One path or several."""
SettingsGiven = Mapping[str, object] | Sequence[str] | None
"""Recipe keys with their values: {"optim.peak_lr": 3e-5}; on the command line "optim.peak_lr=3e-5"."""
Names = str | Sequence[str]
"""Names; on the command line with commas between."""
Sweep = Mapping[str, Sequence[object]] | Sequence[str] | None
"""Recipe keys with the values of each: {"optim.peak_lr": [1e-3, 2e-3]}; or "optim.peak_lr=1e-3,2e-3"."""
COMMAS = "values with commas between"
"""A note on options of one text that Python gives as a list, or as a number, too."""
_ON_COMMAND_LINE: dict[Any, Any] = {
    Any: Path,
    Place: Path,
    Places: list[Path],
    Place | None: Path | None,
    SettingsGiven: list[str] | None,
    Names: str,
    Sweep: list[str] | None,
}
"""Types of options, where those of the Python function are wider."""

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a verb."""

    general: ClassVar[bool] = False
    """True if the help lists the options of this class behind the others."""

    def __post_init__(self) -> None:
        for name, note in annotations_of(type(self)).items():
            value = checked(name, note, getattr(self, name))
            if value is not None and get_args(note)[0] in (Place, Place | None):
                value = Path(value).expanduser()
            object.__setattr__(self, name, value)

    def given(self, *, tuning: bool = True) -> list[tuple[str, str]]:
        """Return the settings of the options that were given, each as its origin and `key=value`.

        An option with two keys sets the first one of a pre-training recipe, and the last one of fine-tuning.
        """
        return [
            (f"`{name}`", f"{key}={value_text(chosen)}")
            for name, note in annotations_of(type(self)).items()
            for setting in get_args(note)[1:]
            if isinstance(setting, Setting) and is_given(value := getattr(self, name))
            for key, chosen in setting.values(value, tuning=tuning)
        ]


def is_given(value: object) -> bool:
    """True for the value of an option that was given; 0 is one."""
    return value is not None and value is not False and value not in ("", ())


def annotations_of(request: type) -> dict[str, Any]:
    """Return the annotated type of each field, in order."""
    hints = get_type_hints(request, include_extras=True)
    return {each.name: hints[each.name] for each in fields(request)}


def checked(name: str, note: Any, value: Any) -> Any:
    """Return the value of an option, a list with commas as one text; raise for one that is not possible.

    The command line has checked its values already.
    """
    kind, *notes = get_args(note) or (note,)
    if value is None:
        return None
    if COMMAS in notes and not isinstance(value, str):
        several = value if isinstance(value, Sequence) else [value]
        return ",".join(map(str, several))
    choices = [
        one for part in (kind, *get_args(kind)) if get_origin(part) is Literal for one in get_args(part)
    ]
    if choices and value not in choices:
        remedy = f"choose from {', '.join(map(str, choices))}"
        raise UserError(f"{value!r} is not a valid choice", key=name, remedy=remedy)
    for each in notes:
        least, most = getattr(each, "min", None), getattr(each, "max", None)
        if least is None and most is None:
            continue
        if not isinstance(value, Real):
            raise UserError(f"{value!r} is not a number", key=name, remedy="give a number")
        if least is not None and not value >= least:
            raise UserError(f"is {value}", key=name, remedy=f"give {least} or more")
        if most is not None and not value <= most:
            raise UserError(f"is {value}", key=name, remedy=f"give {most} or less")
    return value


def lines_of(settings: SettingsGiven) -> list[str]:
    """Return settings as `key=value`."""
    if isinstance(settings, str):
        return [settings]
    if isinstance(settings, Mapping):
        return [f"{key}={value_text(value)}" for key, value in settings.items()]
    return list(settings or ())


def listed(places: Places) -> list[Path]:
    """Return one path or several as a list."""
    given = [places] if isinstance(places, str | Path) else places
    return [Path(each).expanduser() for each in given]


def with_options(verb: Callable[..., R]) -> Callable[..., R]:
    """Return a verb whose request is spelled out: each of its fields is an option."""
    parameters = inspect.signature(verb, eval_str=True).parameters
    requests: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    wanted: list[inspect.Parameter] = []
    for name, each in parameters.items():
        own = _in_order_of_help(requests[name]) if name in requests else [each]
        notes = annotations_of(requests[name]) if name in requests else {name: each.annotation}
        for one in own:
            note = notes[one.name]
            if get_origin(note) is Annotated:
                kind, *rest = get_args(note)
                note = Annotated[(_ON_COMMAND_LINE.get(kind, kind), *rest)]
            wanted.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=note))

    @wraps(verb)
    def spelled_out(**given: Any) -> R:
        for name, each in parameters.items():
            if name in given and name not in requests:
                given[name] = checked(name, each.annotation, given[name])
        for name, kind in requests.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        return verb(**given)

    spelled_out.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
    return spelled_out


def _in_order_of_help(request: type[Request]) -> list[inspect.Parameter]:
    """Return the fields of a request as parameters, those of general options last."""
    general = {name for each in request.__mro__ if vars(each).get("general") for name in each.__annotations__}
    parameters = inspect.signature(request).parameters.values()
    return sorted(parameters, key=lambda each: each.name in general)


def function_of(
    request: Callable[P, R],
) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Return a decorator that gives a function of a request the request's fields as parameters."""

    def decorate(work: Callable[[R], T]) -> Callable[P, T]:
        @wraps(work)
        def call(*given: P.args, **named: P.kwargs) -> T:
            return work(request(*given, **named))

        call.__signature__ = inspect.signature(request)  # type: ignore[attr-defined]
        return call

    return decorate

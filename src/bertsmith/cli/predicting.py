"""Shared by the verbs that predict: opening a model, naming its inputs in errors, and bars."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from typer import echo

from bertsmith.core.errors import Remedy, UserError
from bertsmith.inference.embedded_models import default_model, embedded_models_for
from bertsmith.inference.model_path import is_model, model_folder
from bertsmith.inference.outputs import ABILITIES

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert, Precision


OWN_MODEL = "remove `model` to use the included model"
HOW_TO_GET = {
    "fill": "make one with bertsmith pretrain, then use `model=FOLDER`",
    "next": "make one with bertsmith pretrain --set examples.pairs=nsp, then use `model=FOLDER`",
    "classify": "make one with bertsmith finetune sst2 --data glue/SST-2 --out runs/sst2 (or custom, "
    "for your own table), then use `model=runs/sst2`",
    "tag": "make one with bertsmith finetune ner --data conll2003/ --out runs/ner, then use `model=runs/ner`",
    "answer": "make one with bertsmith finetune squad2 --data squad/ --out runs/squad2, then use "
    "`model=runs/squad2`",
    "choose": "make one with bertsmith finetune swag --data swag/ --out runs/swag (or race, arct), then use "
    "`model=runs/swag`",
    "embed": "",
}
"""Remedy to get a model with an ability, by ability."""
REMEDIES: dict[str, str] = {
    Remedy.PASS_PAIR: "give the second text with `second`, or after a tab",
    Remedy.PASS_TEXT: "remove `second`, or the tab",
}
"""Remedies for the command line, by the remedies of the Python API."""


def open_model(
    folder: Path | None, *abilities: str, device: str, precision: str, base: Path | None = None
) -> "Bert":
    """Open the model of a folder, or an embedded one and print its name; raise if it lacks the abilities."""
    with without_garbage_collection():
        from bertsmith.inference.loaded_model import load

    own = embedded_models_for(*abilities)
    named = cast("Precision", precision)  # `load` rejects any other
    for chosen in (own or [default_model()]) if folder is None else [folder]:
        bert = load(chosen, device=device, precision=named, base=base)
        if set(abilities) & set(bert.abilities):
            if folder is None:
                # On stderr, because a program may read the results.
                echo(f"model: {chosen.name}", err=True)
            return bert
    can = ", ".join(ABILITIES[each] for each in bert.abilities)
    what = f"this model cannot {ABILITIES[abilities[0]]}; it can {can}"
    remedy = HOW_TO_GET[abilities[0]] if folder is None or not own else OWN_MODEL
    if "fill" in abilities and (generator := _generator_of(chosen)) is not None:
        remedy = f"use `model={generator}`, which made up the tokens that this one learned to find"
    raise UserError(what, where=str(chosen), remedy=remedy)


def _generator_of(folder: Path) -> Path | None:
    """Return the generator in the folder of a model that finds replaced tokens, or None."""
    from bertsmith.objectives.replaced_token_detection import GENERATOR

    generator = model_folder(folder) / GENERATOR
    return generator if is_model(generator) else None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside, and exclude the imported objects from it for good.

    None of torch's hundreds of thousands of objects is garbage, and searching them takes a quarter of the
    time of a short command, most of it at the end.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def naming_inputs(name: Callable[[int], str]) -> Iterator[None]:
    """Inside, rewrite errors in the terms of the command line: the name of the text, the option."""
    try:
        yield
    except UserError as error:
        if error.index is None:
            raise
        where = name(error.index) if error.field == "text" else f"the {error.field}"
        remedy = REMEDIES.get(error.remedy, error.remedy)
        raise replace(error, where=where, remedy=remedy) from error

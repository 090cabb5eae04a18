"""`bertsmith look heads`: find the head that predicts each dependency relation."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking

PiecesOption = Annotated[
    Literal["mean", "first"],
    Option(
        "--from-pieces",
        help="Attention of a word: the mean over its pieces (as in the paper) or its first piece's (as "
        "in the paper's code).",
    ),
]


def heads(
    treebank: Annotated[Path, Option(metavar="FILE", help="Treebank to score on, in CoNLL-U.")],
    out: looking.Out,
    choose_on: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Treebank to choose head, direction and offset on; by default the scored one.",
        ),
    ] = None,
    model: options.Model = None,
    from_pieces: PiecesOption = "mean",
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show which head finds which dependency relation.

    A head's guess for a word is the word that it attends to most, or the word that attends to it most. For
    each relation with at least 100 occurrences the best head is chosen on one treebank and scored on another,
    with an interval. The best fixed offset is the baseline, and three networks with random weights are the
    control.

    Example: bertsmith look heads --model models/bert-base --treebank en_ewt-ud-dev.conllu --choose-on
    en_ewt-ud-train.conllu --out look/
    """
    from bertsmith.insight.random_control import of_untrained
    from bertsmith.insight.relations import study_relations
    from bertsmith.insight.relations_report import relations_report
    from bertsmith.insight.treebank import read_treebank

    scored = read_treebank(treebank)
    chosen_on = scored if choose_on is None else read_treebank(choose_on)
    bert = looking.open_for_looking(model, device)
    study = partial(study_relations, scored=scored, chosen_on=chosen_on, mode=from_pieces, seed=seed)
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    how = (
        "Head, direction and offset chosen on the scored sentences, as in the paper."
        if choose_on is None
        else f"Head, direction and offset chosen on {choose_on.name}, scored on {treebank.name}."
    )
    looking.leave(
        [relations_report(found, untrained, model=looking.name_of_model(model), how=how)],
        out,
        as_json=as_json,
    )

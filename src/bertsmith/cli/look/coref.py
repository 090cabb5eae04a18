"""`bertsmith look coref`: find the head that links a mention to its antecedent."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking
from bertsmith.core.errors import UserError

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.insight.coreference import QuestionSet


def coref(
    data: Annotated[
        Path,
        Option(metavar="FILE", help="GAP (.tsv), CoNLL-U with entities (.conllu) or CoNLL-2012 columns."),
    ],
    out: looking.Out,
    choose_on: Annotated[
        Path | None,
        Option(metavar="FILE", help="File to choose the head on; by default the scored one."),
    ] = None,
    model: options.Model = None,
    longest: Annotated[
        int, Option(min=8, help="Tokens of a document to read together (not for GAP); published: 128.")
    ] = 128,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show which head finds the antecedent of a mention.

    A mention's head word points to the earlier mention that it attends to most. The head that is right most
    often is chosen on one file and scored on another, by pronouns, names and other nouns. The baselines are
    the nearest mention, the nearest with the same head word, and rules. In GAP a pronoun has two candidates,
    and the scores are by gender. Three networks with random weights serve as a control.

    Example: bertsmith look coref --data gap-test.tsv --choose-on gap-development.tsv --out look/
    """
    from bertsmith.insight.coreference import study_coreference
    from bertsmith.insight.coreference_report import coreference_report
    from bertsmith.insight.random_control import of_untrained

    bert = looking.open_for_looking(model, device)
    scored = questions_of(bert, data, longest)
    chosen_on = scored if choose_on is None else questions_of(bert, choose_on, longest)
    if chosen_on.kinds != scored.kinds:
        raise UserError(
            "has another format than `data`", where=str(choose_on), remedy="give two files of one format"
        )
    study = partial(study_coreference, scored=scored, chosen_on=chosen_on, seed=seed)
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    how = (
        "The head was chosen on the scored data, as in the paper."
        if choose_on is None
        else f"The head was chosen on {choose_on.name} and scored on {data.name}."
    )
    report = coreference_report(found, untrained, scored, model=looking.name_of_model(model), how=how)
    looking.leave([report], out, as_json=as_json)


def questions_of(bert: "Bert", path: Path, longest: int) -> "QuestionSet":
    """Read the questions of a file in any of the formats."""
    from bertsmith.insight.coreference import document_questions, gap_questions
    from bertsmith.insight.gap import is_gap, read_gap
    from bertsmith.insight.mentions import read_mentions

    if not path.is_file():
        raise UserError("is not a file", where=str(path), remedy="give GAP, CoNLL-U or CoNLL-2012 columns")
    if is_gap(path):
        return gap_questions(bert, read_gap(path))
    return document_questions(bert, read_mentions(path), longest=longest)

"""`bertsmith features` and `features-table`: vectors of tokens from frozen layers, and their evaluation."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, echo

from bertsmith.cli import options
from bertsmith.cli.predicting import without_garbage_collection
from bertsmith.cli.presenting import print_json
from bertsmith.cli.request import lines_of
from bertsmith.cli.spelling import Setting
from bertsmith.cli.text_files import STANDARD_INPUT, computed_pieces
from bertsmith.core.errors import UserError
from bertsmith.core.files import sha256_of
from bertsmith.recipe.finetuning_schema import LayerChoice


def features(
    *,
    source: Annotated[
        Path, Option("--input", metavar="FILE", help="One text a line, or a table; - reads stdin.")
    ],
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder to write; a call that was stopped resumes.")],
    layers: Annotated[
        LayerChoice, Option(help="embeddings, second-to-last, last, last4, all, all-and-embeddings.")
    ] = "last4",
    combine: Annotated[
        str, Option(help="concat: layers side by side; mean; separate: [tokens, layers, width].")
    ] = "concat",
    table: options.TextTable,
    asked: options.AskedExactly,
    truncate: options.Truncate = False,
    as_json: options.Json = False,
) -> None:
    """Write a vector for each token of each text: features for your own model.

    The folder contains memory-mapped arrays in fp32: vectors.npy, tokens.npy (ids), offsets.npy (the first
    and past-the-last character of each token in its text, -1 for special ones), starts.npy (the row at which
    each text begins) and lines.npy. It appears when it is complete; the work of a stopped call is kept.

    Example: bertsmith features --input texts.txt --layers last4 --combine concat --out features/

    Example: bertsmith features --model MODEL --input reviews.csv --text review --layers last --out features/

    In Python: bertsmith.open_features("features/").of_text(0)
    """
    with without_garbage_collection():
        from bertsmith.inference.feature_folder import (
            FeatureRequest,
            FeatureSpec,
            open_features,
            writing_features,
        )

    spec = FeatureSpec(layers, combine)  # type: ignore[arg-type]  # it rejects any other
    texts = table.of(source)
    texts.check()
    bert = asked.open("embed")
    readable_twice = source != STANDARD_INPUT and source.is_file()
    name = f"{sha256_of(source)} {table.column} {table.skip_bad}" if readable_twice else ""
    bad: list[UserError] = []
    request = FeatureRequest(spec, out, name, truncate)
    with writing_features(bert, request) as writer:
        for _ in computed_pieces(
            bert, texts, lambda piece: writer.append(piece.texts, piece.numbers), truncate=truncate, bad=bad
        ):
            pass  # the vectors are written piece by piece
    written = open_features(out)
    facts = {"texts": len(written), "tokens": len(written.tokens), "shape": written.facts["shape"]}
    if as_json:
        print_json({**facts, "out": str(out), **({"skipped": len(bad)} if table.skip_bad else {})})
    else:
        shape = " x ".join(map(str, written.facts["shape"]))
        echo(f"{facts['texts']:,} texts, {facts['tokens']:,} tokens of {shape} numbers -> {out}")


@dataclass(frozen=True, kw_only=True)
class RowRates(options.Rates):
    """The length of every training, and the learning rate of the last row."""

    lr: Annotated[
        float | None,
        Setting("optim.peak_lr"),
        Option(help="Peak learning rate of the fine-tuning row only (optim.peak_lr)."),
    ] = None


def features_table(
    *,
    task: Annotated[str, Argument(metavar="TASK", help="ner, wnut17, pos, sst2 ...")],
    data: Annotated[Path, Option(help="The task's folder, or its file.")],
    out: Annotated[Path, Option(help="Folder for all runs; finished runs are not repeated.")],
    model: Annotated[Path | None, Option(help="Model folder; by default the embedded encoder.")] = None,
    seeds: Annotated[int, Option(min=1, help="Runs for each row, from run.seed (0) on.")] = 3,
    features_lr: Annotated[
        float | None, Option(help="Peak learning rate of the feature-based rows; else 1e-3.")
    ] = None,
    skip_bad: options.SkipBad = False,
    rates: RowRates,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """Fill the feature-based table of the BERT paper: six ways to read frozen layers, and fine-tuning.

    The rows are the embeddings, the second-to-last and the last layer, the weighted sum and the concatenation
    of the last four, and the weighted sum of all, each under a two-layer BiLSTM of 768 units. The encoder
    runs once over the data, for all rows and seeds.

    A call that was stopped or killed resumes with the runs that are not done yet.

    Example: bertsmith features-table ner --model MODEL --data conll2003/ --out runs/features --seeds 5

    Example: bertsmith features-table wnut17 --data wnut17/ --out runs/small --seeds 1 --set features.width=64
    """
    from bertsmith.cli.finetune import stoppable
    from bertsmith.inference.embedded_models import default_model
    from bertsmith.studies.features_table import FeaturesTableRequest, plain_table, table_text
    from bertsmith.studies.features_table import features_table as study
    from bertsmith.tasks.catalogue import task_named

    own = [line for line in lines_of(settings) if line.startswith("features.")]
    shared = [line for line in lines_of(settings) if line not in own]
    shared += [] if rates.epochs is None else [f"run.epochs={rates.epochs}"]
    own += [] if features_lr is None else [f"optim.peak_lr={features_lr}"]
    request = FeaturesTableRequest(
        task_named(task),
        model or default_model(),
        data,
        out,
        seeds=seeds,
        settings=tuple(shared),
        tuning_settings=() if rates.lr is None else (f"optim.peak_lr={rates.lr}",),
        features_settings=tuple(own),
        skip_bad=skip_bad,
    )
    rows = stoppable(partial(study, request), as_json=as_json)
    if as_json:
        print_json(plain_table(rows))
    else:
        echo(table_text(rows, request.task))

"""`bertsmith look probe`: train simple probes on layers and on attention."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Bert
    from bertsmith.insight.probe_report import Probes


def probe(
    treebank: Annotated[Path, Option(metavar="FILE", help="Treebank to score on, in CoNLL-U.")],
    train: Annotated[Path, Option(metavar="FILE", help="Treebank to train the probes on, in CoNLL-U.")],
    out: looking.Out,
    model: options.Model = None,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show what simple probes find: part of speech and depth in each layer, trees in attention.

    From each layer's vectors a linear probe learns the part of speech of a word and its depth in the
    dependency tree. Its control task, random labels of words, can only be learned by heart. From all heads
    together two probes learn to find heads of words: from attention alone, and with static vectors.
    Everything is repeated with three networks of random weights.

    Example: bertsmith look probe --train en_ewt-ud-train.conllu --treebank en_ewt-ud-dev.conllu --out look/
    """
    from bertsmith.insight.dependency_probe import study_dependency_probes
    from bertsmith.insight.layer_probe import study_layers
    from bertsmith.insight.probe_report import Probes, probe_report
    from bertsmith.insight.random_control import of_untrained
    from bertsmith.insight.treebank import read_treebank

    scored, learned = read_treebank(treebank), read_treebank(train)
    bert = looking.open_for_looking(model, device)

    def study(bert: "Bert") -> "Probes":
        layers = study_layers(bert, scored, learned, seed=seed)
        return Probes(layers, study_dependency_probes(bert, scored, learned, seed=seed))

    how = f"Trained on {len(learned):,} sentences of {train.name}, scored on {treebank.name}."
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    report = probe_report(found, untrained, model=looking.name_of_model(model), how=how)
    looking.leave([report], out, as_json=as_json)

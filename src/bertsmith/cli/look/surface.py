"""`bertsmith look surface`: neighbours, special tokens, punctuation, entropy and gradients of every head."""

from functools import partial

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking


def surface(
    texts: looking.Texts,
    out: looking.Out,
    model: options.Model = None,
    longest: looking.Longest = 128,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show what every head attends to on the surface.

    Measures the attention to the previous, next and current token, [CLS], [SEP], periods and commas, and the
    other text of a pair, and how broad it is (entropy). If the model has a masked-LM head, also measures how
    much its loss changes with attention (gradients). Clark et al. 2019 measured these on pairs of paragraphs.
    Three networks with random weights serve as a control.

    Example: bertsmith look surface --model models/bert-base --input texts.txt --out look/
    Pairs of consecutive lines: paste - - < texts.txt > pairs.txt
    """
    from bertsmith.insight.random_control import of_untrained
    from bertsmith.insight.surface import study_surface
    from bertsmith.insight.surface_report import surface_report

    given, bert = looking.texts_or_pairs(texts), looking.open_for_looking(model, device)
    study = partial(study_surface, texts=given, longest=longest, seed=seed)
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    report = surface_report(found, untrained, model=looking.name_of_model(model))
    looking.leave([report], out, as_json=as_json)

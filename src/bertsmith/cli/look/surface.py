"""`bertsmith look surface`: neighbours, special tokens, punctuation, entropy and gradients of every head."""

from functools import partial

from bertsmith.cli.look.look_options import (
    LongestOption,
    OutOption,
    SeedOption,
    TextsOption,
    leave,
    name_of_model,
    open_for_looking,
    texts_or_pairs,
)
from bertsmith.cli.model_options import DeviceOption, JsonOption, ModelOption


def surface(
    texts: TextsOption,
    out: OutOption,
    model: ModelOption = None,
    longest: LongestOption = 128,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
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

    given, bert = texts_or_pairs(texts), open_for_looking(model, device)
    study = partial(study_surface, texts=given, longest=longest, seed=seed)
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    leave([surface_report(found, untrained, model=name_of_model(model))], out, as_json=as_json)

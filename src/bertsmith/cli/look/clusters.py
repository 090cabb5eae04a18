"""`bertsmith look clusters`: map the heads by their attention."""

from functools import partial

from bertsmith.cli import options
from bertsmith.cli.look import look_options as looking


def clusters(
    texts: looking.Texts,
    out: looking.Out,
    model: options.Model = None,
    longest: looking.Longest = 128,
    seed: looking.Seed = 0,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Show which heads have similar attention, as a map.

    The distance of two heads is the Jensen-Shannon divergence between the attention of tokens in them. The
    map places similar heads near each other, and colours them by their surface behaviour. The similarity of
    the heads of a layer in three networks with random weights serves as a control.

    Example: bertsmith look clusters --model models/bert-base --input texts.txt --out look/
    """
    from bertsmith.insight.clusters import kinds_of_heads, study_clusters
    from bertsmith.insight.clusters_report import clusters_report
    from bertsmith.insight.random_control import of_untrained
    from bertsmith.insight.surface import measure_attention

    given, bert = looking.texts_or_pairs(texts), looking.open_for_looking(model, device)
    study = partial(study_clusters, texts=given, longest=longest)
    kinds = kinds_of_heads(measure_attention(bert, given, longest=longest))
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    report = clusters_report(found, kinds, untrained, model=looking.name_of_model(model))
    looking.leave([report], out, as_json=as_json)

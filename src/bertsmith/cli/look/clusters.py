"""`bertsmith look clusters`: map the heads by their attention."""

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


def clusters(
    texts: TextsOption,
    out: OutOption,
    model: ModelOption = None,
    longest: LongestOption = 128,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show which heads attend alike, as a map.

    The distance of two heads is the Jensen-Shannon divergence between the attention of tokens in them. The
    map places similar heads near each other, and colours them by their surface behaviour. The similarity of
    the heads of a layer in three networks with random weights serves as a control.

    Example: bertsmith look clusters --model models/bert-base --input texts.txt --out look/
    """
    from bertsmith.insight.clusters import kinds_of_heads, study_clusters
    from bertsmith.insight.clusters_report import clusters_report
    from bertsmith.insight.random_control import of_untrained
    from bertsmith.insight.surface import measure_attention

    given, bert = texts_or_pairs(texts), open_for_looking(model, device)
    study = partial(study_clusters, texts=given, longest=longest)
    kinds = kinds_of_heads(measure_attention(bert, given, longest=longest))
    found, untrained = study(bert), of_untrained(bert, study, seed=seed)
    leave([clusters_report(found, kinds, untrained, model=name_of_model(model))], out, as_json=as_json)

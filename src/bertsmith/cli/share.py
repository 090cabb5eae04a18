"""`bertsmith share`: turn a trained BERT into an ALBERT with layers that share weights."""

from pathlib import Path
from typing import Annotated, Literal

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.core.files import new_folder

Shared = Literal["all", "attention", "ffn", "none"]
Take = Literal["average", "first"]


def share(
    model: Annotated[Path, Option(metavar="FOLDER", help="A BERT: model or run folder.")],
    out: Annotated[Path, Option(metavar="FOLDER", help="Model folder to write.")],
    sharing: Annotated[
        Shared, Option(help="Weights that layers share: all, attention, ffn or none.")
    ] = "all",
    groups: Annotated[int, Option(help="Groups of neighbouring layers that share with each other.")] = 1,
    take: Annotated[
        Take, Option(help="Weights that a group shares: the average of its layers, or the first layer's.")
    ] = "average",
    embedding_width: Annotated[
        int | None, Option(help="Width of the word table: 128 in ALBERT; by default the model's own.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Turn a trained BERT into an ALBERT: its layers share weights, and its word table can be narrower.

    Only a BERT has the parts of an ALBERT; from another model, distil one (--student albert-base).

    The result needs further training: with `bertsmith pretrain --from`, or with the BERT as its teacher in
    `bertsmith distill`. A narrower table is made of the principal directions of the old one; the model then
    has an MLM head only after training.

    Example: bertsmith share --model MODEL --groups 4 --out models/shared

    Example: bertsmith share --model MODEL --sharing attention --out models/shared-attention

    Example: bertsmith share --model MODEL --embedding-width 128 --out models/albert

    Then: bertsmith distill --teacher MODEL --student models/shared --store store/ --out runs/shared
    """
    from bertsmith.inference.loaded_model import load  # torch loads here, not for --help
    from bertsmith.shrink.sharing import SharedShape, shared_model

    shape = SharedShape(sharing, groups, embedding_width, take)
    with new_folder(out) as fresh:
        bert = load(model, device="cpu")
        shared = shared_model(bert, shape)
        shared.save(fresh)
    weights = [sum(one.numel() for one in each.model.network.parameters()) for each in (bert, shared)]
    heads = [sorted(each.model.network.heads) for each in (bert, shared)]
    if as_json:
        print_json({"out": str(out), "parameters": weights, "heads": heads[1]})
        return
    echo(f"{model} -> {out}: {weights[0]:,} weights -> {weights[1]:,}")
    if lost := [head for head in heads[0] if head not in heads[1]]:
        echo(f"left out: {', '.join(lost)}")
    if sharing in ("attention", "ffn"):
        echo("transformers does not support this sharing: it opens each layer with separate weights")

"""`bertsmith demo`: what the library does, shown on the small model that comes with it."""

from typer import echo

TOP = 4


def demo() -> None:
    """See bertsmith at work on the small model that comes with it.

    Example: bertsmith demo
    """
    from bertsmith.inference.loaded_model import load

    bert = load(device="cpu")
    config = bert.model.network.config
    parameters = sum(each.numel() for each in bert.model.network.parameters())
    echo(f"bertsmith-tiny: {config.layers} layers, width {config.width}, {parameters:,} parameters,")
    echo("pre-trained by this code in five minutes on one GPU. It knows a little of the world.")

    for masked in ("Paris is the [MASK] of France.", "The cat sat on the [MASK]."):
        echo(f"\n>>> bert.fill({masked!r}, top={TOP})")
        for candidates in bert.fill(masked, top=TOP):
            echo("    " + "  ".join(f"{each.token} {each.probability:.3f}" for each in candidates))

    for first, second in (
        ("We got some time.", "Should we get some coffee?"),
        ("The battle was lost.", "Add two spoons of sugar and stir."),
    ):
        answer = bert.next_sentence(first, second)
        echo(f"\n>>> bert.next_sentence({first!r}, {second!r})")
        echo(f"    follows: {answer.follows}, probability {answer.probability:.3f}")

    text = "My dog is cute."
    encoded = bert.tokenizer.encode(text)
    tokens = (bert.tokenizer.token(number) for number in encoded.ids)
    offsets = zip(tokens, encoded.offsets, strict=True)
    echo(f"\n>>> bert.tokenizer.encode({text!r})")
    echo("    " + "  ".join(f"{token}@{start}-{end}" for token, (start, end) in offsets))

    texts: list[str | tuple[str, str]] = [text, ("A boy plays in the snow.", "A boy is outside.")]
    echo(f"\n>>> bert.hidden_states({texts!r})")
    for states in bert.hidden_states(texts):
        echo(f"    {tuple(states.shape)}: layers + 1, tokens, width; nothing padded")

    vectors = bert.embed(["The cat sits on the mat.", "It was cold in the park."], pooling="mean")
    echo(f"\n>>> bert.embed([...], pooling='mean')\n    {tuple(vectors.shape)}: texts, width")
    echo("\nNext: bertsmith.load('path/to/model-folder') opens any BERT you have. See README.md.")

"""`bertsmith demo`: what the library does, shown on a tiny model that is made on the spot."""

from pathlib import Path
from tempfile import TemporaryDirectory

from typer import echo


def demo() -> None:
    """See bertsmith at work on a tiny model.

    The model is made on the spot with random weights: its guesses show the interface, not knowledge.

    Example: bertsmith demo
    """
    from bertsmith.inference.bert import load  # torch loads here, not for --help
    from bertsmith.inference.demo import write_demo_model

    with TemporaryDirectory() as place:
        folder = Path(place) / "tiny-bert"
        write_demo_model(folder)
        bert = load(folder, device="cpu")
        shape = bert.model.network.shape
        parameters = sum(each.numel() for each in bert.model.network.parameters())
        echo(f"A tiny BERT: {shape.layers} layers, width {shape.width}, {parameters:,} parameters.")
        echo("Its weights are random, so its answers are too: this shows the interface, not knowledge.\n")

        text = "My dog is cute."
        encoded = bert.tokenizer.encode(text)
        echo(f">>> bert.tokenizer.encode({text!r})")
        tokens = (bert.tokenizer.token(number) for number in encoded.ids)
        echo(
            "    "
            + "  ".join(f"{token}@{a}-{b}" for token, (a, b) in zip(tokens, encoded.offsets, strict=True))
        )

        texts: list[str | tuple[str, str]] = [text, ("A boy plays in the snow.", "A boy is outside.")]
        echo(f"\n>>> bert.hidden_states({texts!r})")
        for states in bert.hidden_states(texts):
            echo(f"    {tuple(states.shape)}: layers + 1, tokens, width; nothing padded")

        masked = "The [MASK] sits under the [MASK]."
        echo(f"\n>>> bert.fill({masked!r}, top=3)")
        for guesses in bert.fill(masked, top=3):
            echo("    " + "  ".join(f"{guess.token} {guess.probability:.3f}" for guess in guesses))

        echo("\n>>> bert.next_sentence('We got some time.', 'Should we get some coffee?')")
        echo(f"    {bert.next_sentence('We got some time.', 'Should we get some coffee?')}")

        vectors = bert.embed(["The cat sits on the mat.", "It was cold in the park."], pooling="mean")
        echo(f"\n>>> bert.embed([...], pooling='mean')\n    {tuple(vectors.shape)}: texts, width")
        echo("\nNext: bertsmith.load('path/to/model-folder') opens any BERT you have. See README.md.")

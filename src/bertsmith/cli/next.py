"""`bertsmith next`: does one sentence follow another?"""

from dataclasses import asdict
from typing import Annotated

from typer import Argument

from bertsmith.cli.model_options import (
    DeviceOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    TruncateOption,
    bars,
    console,
    naming_inputs,
    open_model,
    print_json,
)


def next_sentence(
    first: Annotated[str, Argument(metavar="A", help="A sentence, or several.")],
    second: Annotated[str, Argument(metavar="B", help="What may follow it.")],
    model: ModelOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    truncate: TruncateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether B follows A.

    Uses the head of BERT's second pre-training task, next sentence prediction: half of the pairs it was
    shown stood together in a document, the others did not.

    Example: bertsmith next "We got some time." "Should we get some coffee?"
    """
    bert = open_model(model, "next", device=device, precision=precision)
    with naming_inputs(lambda _: "the pair"):
        found = bert.next_sentence(first, second, truncate=truncate)
    if as_json:
        print_json(asdict(found))
        return
    both = [(found.probability, "B follows A"), (1 - found.probability, "B stands elsewhere")]
    for line in bars(sorted(both, reverse=True)):
        console().print(line)

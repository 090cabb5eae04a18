"""What a model says of a split, in the files that the official scorers and other programs read."""

from collections.abc import Sequence
from pathlib import Path

from bertsmith.ground.files import write_json, write_text
from bertsmith.tasks.answers import Guess, QuestionAnswer
from bertsmith.tasks.examples import ChoiceExample, TaggedExample


def write_answers(folder: Path, answers: Sequence[QuestionAnswer]) -> tuple[Path, Path, Path]:
    """Write predictions.json, nbest_predictions.json and null_odds.json as run_squad.py does; their paths."""
    predictions, nbest, odds = (
        folder / f"{name}.json" for name in ("predictions", "nbest_predictions", "null_odds")
    )
    write_json(predictions, {answer.key: answer.text for answer in answers})
    write_json(nbest, {answer.key: [_considered(guess) for guess in answer.nbest] for answer in answers})
    write_json(odds, {answer.key: answer.null_odds for answer in answers})
    return predictions, nbest, odds


def write_tags(file: Path, sentences: Sequence[TaggedExample], *, guesses: Sequence[Sequence[str]]) -> None:
    """Write each word with its gold tag (where it is known) and its guessed one on a line, for conlleval.

    Spaces part the columns, or tabs (conlleval -d '\\t') if some word holds a space.
    """
    separator = "\t" if any(" " in word for sentence in sentences for word in sentence.words) else " "
    blocks = []
    for sentence, guessed in zip(sentences, guesses, strict=True):
        columns = (
            (sentence.words, guessed) if sentence.tags is None else (sentence.words, sentence.tags, guessed)
        )
        blocks.append("".join(f"{separator.join(cells)}\n" for cells in zip(*columns, strict=True)))
    write_text(file, "\n".join(blocks))


def write_choices(
    file: Path,
    examples: Sequence[ChoiceExample],
    *,
    guesses: Sequence[int],
    shares: Sequence[Sequence[float]],
) -> None:
    """Write the id of each example, the option that was chosen, counted from 0, and the probability of each.

    An example with fewer options than another has empty cells at its end.
    """
    options = max((len(each) for each in shares), default=0)
    lines = ["\t".join(["id", "prediction", *map(str, range(options))])]
    for example, guess, told in zip(examples, guesses, shares, strict=True):
        empty = [""] * (options - len(told))
        lines.append("\t".join([example.key, str(guess), *(f"{share:.6f}" for share in told), *empty]))
    write_text(file, "\n".join(lines) + "\n")


def _considered(guess: Guess) -> dict[str, str | float]:
    return {
        "text": guess.text,
        "probability": guess.probability,
        "start_logit": guess.start_score,
        "end_logit": guess.end_score,
    }

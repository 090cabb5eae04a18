"""The object people hold: a trained encoder with its tokenizer, and what it can say of texts."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_folder
from bertsmith.inference.default_model import DEFAULT_MODEL
from bertsmith.inference.engine import Engine, Text
from bertsmith.inference.filling import (
    Filling,
    Guess,
    encode_masked,
    fill_each_mask,
    fill_jointly,
    refuse_unless_count,
)
from bertsmith.inference.replies import Choice, Classification, Entity, TaggedWord
from bertsmith.inference.tuned import Tuned, read_tuned, tuned_files, write_tuned
from bertsmith.model.encoder import first_of_rows, largest_of_rows, mean_of_rows
from bertsmith.model.family import member_of
from bertsmith.model.tensor_files import WEIGHT_FILES
from bertsmith.model.weights import Model, read_model, write_model
from bertsmith.packed import PackedBatch, unpack
from bertsmith.tasks.answers import QuestionAnswer
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.tokenizer_files import TOKENIZER_FILES

if TYPE_CHECKING:
    from bertsmith.inference.asking import Asker, Sentence

Pooling = Literal["mean", "cls", "max"]
Precision = Literal["fp32", "bf16"]
POOLS = {"mean": mean_of_rows, "cls": first_of_rows, "max": largest_of_rows}
PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

MOST_SPARE_ROWS = 128
"""Embedding matrices are rounded up for speed; more spare rows than this speak of another vocabulary."""

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class NextSentence:
    """Whether the second text follows the first, and how sure the model is that it does."""

    follows: bool
    probability: float


def load(
    folder: Path | str = DEFAULT_MODEL, *, device: str = "auto", precision: Precision = "fp32"
) -> "Bert":
    """Open a Hugging Face model folder, ours or anyone's, or that of a run; without a name the project's own.

    Example: bertsmith.load("path/to/model-folder", device="cuda", precision="bf16")
    """
    if precision not in tuple(PRECISIONS):
        raise UserError(f"unknown precision {precision!r}", remedy=f"choose one of {', '.join(PRECISIONS)}")
    _usable(device)
    _refuse_unless_folder(Path(folder).expanduser())
    folder = model_folder(Path(folder).expanduser())
    model, tuned = read_model(folder, dtype=PRECISIONS[precision]), read_tuned(folder)
    tokenizer = Tokenizer.load(folder)
    refuse_other_vocabulary(model, tokenizer, where=str(folder))
    for note in _worth_telling(model, tuned):
        log.warning("%s: %s", folder, note)
    return Bert(model, tokenizer, device=device, tuned=tuned)


def model_folder(folder: Path) -> Path:
    """The model folder that is meant: the one of this name, or the one in the folder of a run."""
    inner = folder / "model"
    named_run = not (folder / "config.json").exists() and (inner / "config.json").exists()
    return inner if named_run else folder


def refuse_other_vocabulary(model: Model, tokenizer: Tokenizer, *, where: str) -> None:
    """Stop where the tokenizer can give ids that the model has no embedding for."""
    rows, entries = model.network.shape.vocabulary, tokenizer.vocabulary_size
    if entries > rows:
        what = f"the tokenizer has {entries} entries but the model {rows} embedding rows"
        raise UserError(what, where=where, remedy="put the tokenizer there that the model was trained with")
    if rows - entries > MOST_SPARE_ROWS:
        log.warning("%s: %d of the model's %d embedding rows have no token", where, rows - entries, rows)
    segments = 1 + max(tokenizer.encode_pair("a", "a").segments, default=0)
    if segments > model.network.shape.segments > 1:
        what = f"the tokenizer numbers {segments} segments but the model has {model.network.shape.segments}"
        raise UserError(what, where=where, remedy="put the tokenizer there that the model was trained with")


class Bert:
    """A trained encoder with its tokenizer."""

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, device: str = "auto", tuned: Tuned | None = None
    ) -> None:
        chosen = _usable(device)
        self.model, self.tokenizer, self.tuned = model, tokenizer, tuned
        self._askers: dict[str, Asker] = {}
        self.engine = Engine(model.network.to(chosen).eval(), tokenizer, chosen)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the folder brought."""
        return tuple(head for head in self.model.network.heads if head not in self.model.untrained)

    def __repr__(self) -> str:
        shape = self.model.network.shape
        size = f"{shape.layers} layers of width {shape.width} on {self.engine.device}"
        return f"<Bert {shape.model_type}, {size}, heads: {', '.join(self.heads) or 'none'}>"

    def hidden_states(self, texts: Iterable[Text], *, truncate: bool = False) -> list[Tensor]:
        """For each text, its states after the embeddings and after each layer [layers + 1, tokens, width]."""

        def states(batch: PackedBatch) -> list[Tensor]:
            layers_LTD = torch.stack(self.model.network.encoder.hidden_states(batch)).float().cpu()
            return [each.transpose(0, 1).clone() for each in unpack(layers_LTD.transpose(0, 1), batch.layout)]

        return list(self.engine.answer_each(texts, states, truncate=truncate))

    def embed(self, texts: Iterable[Text], *, pooling: Pooling = "mean", truncate: bool = False) -> Tensor:
        """One vector for each text [texts, width]: the mean, first or largest of its last states."""
        if pooling not in tuple(POOLS):
            raise UserError(f"unknown pooling {pooling!r}", remedy=f"choose one of {', '.join(POOLS)}")

        def vectors(batch: PackedBatch) -> list[Tensor]:
            return list(POOLS[pooling](self.model.network(batch), batch.layout).float().cpu())

        found = list(self.engine.answer_each(texts, vectors, truncate=truncate))
        return torch.stack(found) if found else torch.empty(0, self.model.network.shape.width)

    def fill(self, text: str, *, top: int = 5, truncate: bool = False) -> list[list[Guess]]:
        """For each mask of the text the most probable tokens, each mask by itself."""
        self._need("mlm", "to fill masks")
        return fill_each_mask(self.engine, encode_masked(self.engine, text, truncate=truncate), top)

    def fill_jointly(
        self, text: str, *, top: int = 5, beam: int = 10, truncate: bool = False
    ) -> list[Filling]:
        """The most probable fillings of all masks together: each sees what was put into those before it."""
        self._need("mlm", "to fill masks")
        return fill_jointly(self.engine, encode_masked(self.engine, text, truncate=truncate), top, beam)

    def next_sentence(self, first: str, second: str, *, truncate: bool = False) -> NextSentence:
        """Whether the second text follows the first."""
        self._need("nsp", "to say whether one sentence follows another")
        network = self.model.network

        def scores(batch: PackedBatch) -> list[Tensor]:
            return list(network.scores("nsp", network(batch), batch.layout).float().softmax(-1).cpu())

        (probabilities,) = self.engine.answer_each([(first, second)], scores, truncate=truncate)
        follows = float(probabilities[member_of(network.shape.model_type).next_label])
        return NextSentence(follows > 0.5, follows)

    def classify(self, texts: Iterable[Text], *, truncate: bool = False) -> list[Classification]:
        """The class of each text or pair, or its classes where it may have several.

        A fine-tuned folder has its own rule for long texts, and `truncate` adds nothing to it.
        """
        return self._asker("classify", "to classify texts").classify(texts, truncate=truncate)

    def score(self, texts: Iterable[Text], *, truncate: bool = False) -> list[float]:
        """The number that a model for regression gives each text or pair; long texts as in `classify`."""
        return self._asker("classify", "to score texts").score(texts, truncate=truncate)

    def tag(self, sentences: "Iterable[Sentence]") -> list[list[TaggedWord]]:
        """The tag of each word; a sentence is a string, or a list of words. Long ones are read in windows."""
        return self._asker("tag", "to tag words").tag(sentences)

    def entities(self, text: str) -> list[Entity]:
        """The stretches of a text that a tagger marks, such as names."""
        return self._asker("tag", "to find entities").entities(text)

    @overload
    def answer(self, question: str, passage: str) -> QuestionAnswer: ...

    @overload
    def answer(self, question: str, passage: str, *, best: Literal[1]) -> QuestionAnswer: ...

    @overload
    def answer(self, question: str, passage: str, *, best: int) -> QuestionAnswer | list[QuestionAnswer]: ...

    def answer(self, question: str, passage: str, *, best: int = 1) -> QuestionAnswer | list[QuestionAnswer]:
        """What the passage answers, to the letter, or a list with the next `best` - 1 after it.

        A long passage is read in windows. Where it holds no answer, by the folder's threshold, `text` is
        empty and `start` is -1.
        """
        refuse_unless_count("best", best)
        found = self._asker("span", "to answer questions").answers(question, passage)
        return found[0] if best == 1 else found[:best]

    def choose(self, options: Iterable[tuple[str, str]], *, truncate: bool = False) -> Choice:
        """Which of several pairs is right; long pairs as in `classify`."""
        return self._asker("choice", "to choose among texts").choose(options, truncate=truncate)

    def save(self, folder: Path | str) -> None:
        """Write a model folder that `load` and the Hugging Face tools open."""
        replaces = (*WEIGHT_FILES, *TOKENIZER_FILES, *tuned_files())
        with atomic_folder(Path(folder).expanduser(), replaces=replaces) as fresh:
            write_model(fresh, self.model)
            self.tokenizer.save(fresh)
            if self.tuned:
                write_tuned(fresh, self.tuned)

    def _asker(self, head: str, purpose: str) -> "Asker":
        from bertsmith.inference.asking import asker_of  # at the top it would be a circle: it opens folders

        self._need(head, purpose)
        if head not in self._askers:
            self._askers[head] = asker_of(self.model, self.engine, head, self.tuned)
        return self._askers[head]

    def _need(self, head: str, purpose: str) -> None:
        if self.tuned is not None and self.tuned.mix and self.tuned.note.head_name == head:
            return  # a mix of layers answers in its place
        network = self.model.network
        member = member_of(network.shape.model_type)
        if head not in member.heads:
            what = f"{member.model_type} models have no {head} head, which it takes {purpose}"
            raise UserError(what, remedy="take a model of another family")
        present = ", ".join(self.heads) or "none"
        remedy = f"load a folder that was saved with it (heads here: {present})"
        passes_by = self.tuned is not None and self.tuned.reads_raw
        for needed in (head, *(() if passes_by else member.heads[head].needs)):
            if needed not in self.heads:
                raise UserError(f"this model has no {needed} head, which it takes {purpose}", remedy=remedy)


def _worth_telling(model: Model, tuned: Tuned | None) -> tuple[str, ...]:
    """The notes on a folder, without the last one where it tells of a fresh pooler that nothing reads."""
    passed_by = tuned is not None and tuned.reads_raw and model.untrained == ("pooler",)
    return model.notes[:-1] if passed_by else model.notes


def _usable(device: str) -> torch.device:
    """The device of this name, if this machine has it."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        chosen = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:80]
        remedy = "choose auto, cpu, or cuda where there is a GPU"
        raise UserError(f"cannot use the device {device!r} ({reason})", remedy=remedy) from error
    if chosen.type == "meta":
        raise UserError("the meta device computes nothing", remedy="choose auto, cpu or cuda")
    return chosen


def _refuse_unless_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.is_file():
        remedy = f"give the folder that holds it, {folder.parent}"
        raise UserError("is a file, not a model folder", where=str(folder), remedy=remedy)
    remedy = "give the path of a folder on this machine: bertsmith opens folders and downloads nothing"
    raise UserError("there is no such folder", where=str(folder), remedy=remedy)

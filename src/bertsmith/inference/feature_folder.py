"""A folder of features: a vector for each token of many texts, as memory-mapped arrays, and their sources.

Shapes: T tokens of all texts, S1 = texts + 1 boundaries, L chosen layers, D width of the model.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.core.arrays import GrowingNpy, open_array
from bertsmith.core.errors import UserError
from bertsmith.core.files import (
    check_not_taken,
    lock_for_this_process,
    open_lock_file,
    read_json,
    reporting_write_errors,
    write_json,
)
from bertsmith.features.layer_states import encoder_hash, layer_numbers
from bertsmith.inference.engine import WINDOW_TEXTS
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.text_reader import TextInput, as_list
from bertsmith.packed import PackedBatch, unpack
from bertsmith.recipe.finetuning_schema import LayerChoice
from bertsmith.text.tokenizer import Encoded

Combine = Literal["concat", "mean", "separate"]
FEATURES_FILE, PROGRESS_FILE = "features.json", "progress.json"
LOCK = ".lock"
NO_OFFSETS = -1
"""Both offsets of a special token, which is not part of a text."""


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Layers of the features, and the way to combine them."""

    layers: LayerChoice = "last4"
    combine: Combine = "concat"

    def __post_init__(self) -> None:
        for name, given, known in (
            ("layers", self.layers, get_args(LayerChoice)),
            ("combine", self.combine, get_args(Combine)),
        ):
            if given not in known:
                raise UserError(f"unknown {name} {given!r}", remedy=f"choose one of {', '.join(known)}")

    def shape(self, bert: Bert) -> tuple[int, ...]:
        """Return the shape of one token's features."""
        config, count = bert.model.network.config, len(self.numbers(bert))
        shapes = {"concat": (count * config.width,), "mean": (config.width,)}
        return shapes.get(self.combine, (count, config.width))

    def numbers(self, bert: Bert) -> tuple[int, ...]:
        """Return the numbers of the layers; 0 means the embeddings."""
        return layer_numbers(self.layers, bert.model.network.encoder.layers)


@dataclass(frozen=True, slots=True)
class Features:
    """The features of a folder, memory-mapped."""

    facts: dict[str, Any]
    """Content of features.json: the model, the layers and the way they are combined."""
    vectors: NDArray[np.float32]
    """[T, L * D] (concat), [T, D] (mean) or [T, L, D] (separate)."""
    tokens: NDArray[np.int32]
    """[T] ids."""
    offsets: NDArray[np.int32]
    """[T, 2] first and past-the-last code point of each token in its text; (-1, -1) of a special one."""
    starts: NDArray[np.int64]
    """[S1] first row of each text, and the number of all rows."""
    lines: NDArray[np.int64]
    """[texts] line or row of each text in the input, counted from 1."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of_text(self, number: int) -> NDArray[np.float32]:
        """Return the features of each token of a text, counted from 0."""
        begin, end = self.starts[number : number + 2]
        return self.vectors[begin:end]


def open_features(folder: Path | str) -> Features:
    """Open the features that `bertsmith features` or `extract_features` wrote."""
    place = Path(folder).expanduser()
    facts = read_json(place / FEATURES_FILE, remedy="give a folder written by `bertsmith features`")
    if facts.get("format") != 1:
        remedy = "open it with a newer bertsmith"
        raise UserError(f"has format {facts.get('format')!r}, not 1", where=str(place), remedy=remedy)
    arrays = {name: _opened(place / f"{name}.npy") for name in ("vectors", "tokens", "offsets", "starts")}
    lines = _opened(place / "lines.npy")
    texts, tokens = facts.get("texts", -1), facts.get("tokens", -1)
    rows = {name: (tokens,) for name in arrays} | {"starts": (lines.size + 1,)}
    if any(arrays[name].shape[:1] != rows[name] for name in arrays) or lines.shape != (texts,):
        raise UserError(
            "its arrays do not fit together", where=str(place), remedy="extract the features again"
        )
    return Features(facts, **arrays, lines=lines)


def _opened(file: Path) -> NDArray[Any]:
    remedy = "copy the whole folder again, or extract the features again"
    try:
        return open_array(file, remedy=remedy)
    except FileNotFoundError as error:
        raise UserError("is missing", where=str(file), remedy=remedy) from error


def _computed(bert: Bert, spec: FeatureSpec, encoded: Sequence[Encoded]) -> list[Tensor]:
    numbers = spec.numbers(bert)

    def of_batch(batch: PackedBatch) -> list[Tensor]:
        every = bert.engine.network.encoder.hidden_states(batch)
        states_TLD = torch.stack([every[number] for number in numbers], 1).float()
        combined = states_TLD.mean(1) if spec.combine == "mean" else states_TLD
        if spec.combine == "concat":
            combined = states_TLD.flatten(1)
        return [each.clone() for each in unpack(combined.cpu(), batch.layout)]

    return bert.engine.predict_encoded(encoded, of_batch)


# ---- writing


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Features to write, and their folder."""

    spec: FeatureSpec
    out: Path
    source: str = ""
    """Hash of the input's content, or "" if the input cannot be read twice."""
    truncate: bool = False

    @property
    def unfinished(self) -> Path:
        """Hidden folder that is renamed once it is complete."""
        return self.out.parent / f".{self.out.name}.unfinished"


@contextmanager
def writing_features(bert: Bert, request: FeatureRequest) -> Iterator["FeatureWriter"]:
    """Yield a writer that takes texts piece by piece; the folder appears when all pieces are written.

    Until then a hidden folder next to it contains them. After a stop, the same call continues there.
    """
    place = request.unfinished
    check_not_taken(request.out)
    with reporting_write_errors(request.out, hidden=place):
        with _alone_in(place), ExitStack() as files:
            writer = FeatureWriter(bert, request, _progress(bert, request))
            for name, (form, rows) in writer.forms().items():
                writer.arrays[name] = files.enter_context(GrowingNpy(place / f"{name}.npy", *form, rows=rows))
            try:
                yield writer
            except UserError:  # the user corrects the input, so the next call has another one
                shutil.rmtree(place)
                raise
            writer.write_facts()
        if request.out.is_dir():
            request.out.rmdir()  # an empty folder, as was checked
        place.rename(request.out)


@contextmanager
def _alone_in(place: Path) -> Iterator[None]:
    handle = open_lock_file(place / LOCK)
    try:
        lock_for_this_process(handle)
    except OSError as error:
        os.close(handle)
        what = "another process is writing these features"
        raise UserError(what, where=str(place), remedy="wait for it, or choose another `out`") from error
    try:
        yield
        (place / LOCK).unlink()
    finally:
        os.close(handle)


def _progress(bert: Bert, request: FeatureRequest) -> "_Progress":
    """Return the progress of an earlier start of the same call; remove what another call left."""
    place = request.unfinished
    for half in place.glob(".*.partial"):
        half.unlink()
    if (place / PROGRESS_FILE).is_file():
        known = read_json(place / PROGRESS_FILE, remedy="remove it")
        if request.source and known["settings"] == _settings(bert, request):
            return _Progress(**known["done"])
    for file in [each for each in place.iterdir() if each.name != LOCK]:
        file.unlink()
    return _Progress()


def _settings(bert: Bert, request: FeatureRequest) -> dict[str, Any]:
    return {
        **asdict(request.spec),
        "source": request.source,
        "truncate": request.truncate,
        "encoder": encoder_hash(bert.model.network),
        "tokenizer": bert.tokenizer.spec.pipeline,
    }


@dataclass(frozen=True, slots=True)
class _Progress:
    """Number of pieces, texts and tokens in the arrays."""

    pieces: int = 0
    texts: int = 0
    tokens: int = 0


@dataclass(slots=True)
class FeatureWriter:
    """Appends the features of texts to the arrays of a folder that is being written."""

    bert: Bert
    request: FeatureRequest
    done: _Progress
    """Progress that is on disk."""
    arrays: dict[str, GrowingNpy] = field(default_factory=dict)
    _seen: int = 0

    def forms(self) -> dict[str, tuple[tuple[str, tuple[int, ...]], int]]:
        """Return the type and row shape of each array, and the number of rows that it has."""
        texts, tokens = self.done.texts, self.done.tokens
        return {
            "vectors": (("<f4", self.request.spec.shape(self.bert)), tokens),
            "tokens": (("<i4", ()), tokens),
            "offsets": (("<i4", (2,)), tokens),
            "starts": (("<i8", ()), texts + 1 if self.done.pieces else 0),
            "lines": (("<i8", ()), texts),
        }

    def append(self, texts: Sequence[TextInput], lines: Sequence[int]) -> None:
        """Write the features of the next texts and their line numbers, unless they are on disk already."""
        self._seen += 1
        if self._seen <= self.done.pieces:
            return
        arrays, encoded = self.arrays, self.bert.reader.encode(texts, truncate=self.request.truncate)
        if not arrays["starts"].rows:
            arrays["starts"].append(np.zeros(1, np.int64))
        for each, vectors in zip(encoded, _computed(self.bert, self.request.spec, encoded), strict=True):
            inside = np.array(each.sequence)[:, None] >= 0
            arrays["vectors"].append(vectors.numpy())
            arrays["tokens"].append(np.array(each.ids, np.int32))
            arrays["offsets"].append(np.where(inside, np.array(each.offsets), NO_OFFSETS))
            arrays["starts"].append(np.array([arrays["tokens"].rows]))
        arrays["lines"].append(np.array(lines, np.int64))
        for array in arrays.values():
            array.flush()
        self.done = _Progress(self._seen, arrays["lines"].rows, arrays["tokens"].rows)
        known = {"settings": _settings(self.bert, self.request), "done": asdict(self.done)}
        write_json(self.request.unfinished / PROGRESS_FILE, known)

    def write_facts(self) -> None:
        """Replace the progress file by the description of the arrays."""
        spec, config = self.request.spec, self.bert.model.network.config
        facts = {
            "format": 1,
            **asdict(spec),
            "layer_numbers": list(spec.numbers(self.bert)),
            "shape": list(spec.shape(self.bert)),
            "texts": self.done.texts,
            "tokens": self.done.tokens,
            "model_type": config.model_type,
            "encoder": encoder_hash(self.bert.model.network),
        }
        write_json(self.request.unfinished / FEATURES_FILE, facts)
        (self.request.unfinished / PROGRESS_FILE).unlink()


def extract_features(  # noqa: PLR0913 - the options of the verb, from Python
    texts: Iterable[TextInput],
    *,
    out: Path | str,
    model: Path | str | Bert | None = None,
    layers: LayerChoice = "last4",
    combine: Combine = "concat",
    truncate: bool = False,
) -> Features:
    """Write a vector for each token of each text into a folder, and open it.

    Example: bertsmith.extract_features(["A warm day."], out="features", layers="last").of_text(0)
    """
    bert = model if isinstance(model, Bert) else load(model)
    given = as_list(texts)
    source = hashlib.sha256(repr(given).encode()).hexdigest()
    request = FeatureRequest(FeatureSpec(layers, combine), Path(out).expanduser(), source, truncate)
    with writing_features(bert, request) as writer:
        for first in range(0, len(given), WINDOW_TEXTS):
            piece = given[first : first + WINDOW_TEXTS]
            try:
                writer.append(piece, range(first + 1, first + 1 + len(piece)))
            except UserError as error:
                index = None if error.index is None else error.index + first
                raise replace(error, index=index) from error
    return open_features(request.out)

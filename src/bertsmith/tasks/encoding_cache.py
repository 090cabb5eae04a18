"""Encoded splits kept on disk under a hash of all that they depend on."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_path
from bertsmith.recipe.finetuning import TextSection
from bertsmith.tasks.encoded import EncodedSet, QuestionWindows
from bertsmith.tasks.examples import Example, Kind
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.tokenizer_files import token_name

ENCODING = 1
"""Raised whenever the code encodes anything differently."""
NOT_CONTENT = frozenset({"key", "where", "article"})
"""What an example is called and where it stands makes no difference to its tokens."""

log = logging.getLogger("bertsmith")


def encoding_key(
    kind: Kind,
    examples: Sequence[Example],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    text: TextSection,
) -> str:
    """A hash of all that decides how these examples are encoded."""
    settings = json.dumps([ENCODING, kind, labels, text.model_dump(mode="json")])
    digest = hashlib.sha256(settings.encode())
    digest.update(tokenizer.blueprint.pipeline.encode())
    digest.update(str(token_name(tokenizer.blueprint.settings, "unk_token")).encode())
    for example in examples:
        digest.update(_content(example).encode())
    return digest.hexdigest()


def cached_encoding(folder: Path, key: str, make: Callable[[], EncodedSet]) -> EncodedSet:
    """The encoded set kept under this key; where there is none, or a damaged one, it is made and kept.

    A folder that cannot be written is told once and done without.
    """
    path = folder / f"{key}.safetensors"
    kept = _read(path)
    if kept is not None:
        return kept
    made = make()
    try:
        _write(path, made)
    except UserError as error:
        _tell_once(folder, error.what)
    return made


@cache
def _tell_once(folder: Path, what: str) -> None:
    log.warning("%s: %s; every run encodes its texts anew", folder, what)


def _content(example: Example) -> str:
    names = (field.name for field in fields(example) if field.name not in NOT_CONTENT)
    return repr([getattr(example, name) for name in names])


# --- one file: named arrays, and a hash of them ---


def _write(path: Path, encoded: EncodedSet) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(encoded)}
    with atomic_path(path) as temporary:
        try:
            save_file(arrays, temporary, metadata={"kind": encoded.kind, "sha256": _hash(arrays)})
        except SafetensorError as error:  # how a full disk looks from here
            raise OSError(str(error)) from error


def _read(path: Path) -> EncodedSet | None:
    """The encoded set of a file, None if there is no file or it is not as it was written."""
    try:
        with safe_open(path, framework="np") as file:
            note = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except FileNotFoundError:
        return None
    except (SafetensorError, OSError) as error:
        log.warning("%s: cannot be read (%s); it is made anew", path, error)
        return None
    if note.get("sha256") != _hash(arrays) or note.get("kind") not in get_args(Kind):
        log.warning("%s: is damaged; it is made anew", path)
        return None
    return _put_together(cast(Kind, note["kind"]), arrays)


def _arrays(encoded: EncodedSet) -> Iterable[tuple[str, NDArray[Any]]]:
    for whole in (encoded, encoded.windows):
        for field in fields(whole) if whole is not None else ():
            if isinstance(array := getattr(whole, field.name), np.ndarray):
                yield field.name, array


def _put_together(kind: Kind, arrays: dict[str, NDArray[Any]]) -> EncodedSet:
    of_windows = [field.name for field in fields(QuestionWindows)]
    windows = QuestionWindows(*(arrays.pop(name) for name in of_windows)) if kind == "span" else None
    return EncodedSet(kind=kind, windows=windows, **arrays)


def _hash(arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()

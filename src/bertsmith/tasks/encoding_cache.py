"""A cache of encoded splits on disk, under a hash of everything that they depend on."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from bertsmith.core.cache import make_room_after, mark_used
from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path
from bertsmith.model.folder.tensor_files import safetensors_errors
from bertsmith.recipe.finetuning_schema import TextSection
from bertsmith.tasks.encoded import EncodedSet, QuestionWindows
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.kinds.kind import AnyKind
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.tokenizer_settings import token_name

ENCODING = 2
"""Version of the encoding; raise it whenever the code encodes anything differently."""
NOT_CONTENT = frozenset({"key", "where", "article", "pieces", "tokens"})
"""Fields that do not affect the tokens: an example's name, its location and cached values."""

log = logging.getLogger("bertsmith")


def encoding_key(
    kind: AnyKind,
    examples: Sequence[Example],
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    text: TextSection,
) -> str:
    """Return a hash of everything that decides how these examples are encoded."""
    settings = json.dumps([ENCODING, kind.name, labels, text.model_dump(mode="json")])
    digest = hashlib.sha256(settings.encode())
    digest.update(tokenizer.spec.pipeline.encode())
    for role in ("unk_token", "sep_token", "eos_token"):  # one of the last two may divide pairs
        digest.update(repr(token_name(tokenizer.spec.settings, role)).encode())
    for example in examples:
        names = (field.name for field in fields(example) if field.name not in NOT_CONTENT)
        digest.update(repr([getattr(example, name) for name in names]).encode())
    return digest.hexdigest()


def cached_encoding(folder: Path, key: str, kind: AnyKind, make: Callable[[], EncodedSet]) -> EncodedSet:
    """Return the encoded set with this key; if it is missing or damaged, make and store it.

    If the folder cannot be written, warn once and continue without a cache.
    """
    path = folder / f"{key}.safetensors"
    kept = _read(path, kind)
    if kept is not None:
        return kept
    made = make()
    try:
        _write(path, made, kind)
    except UserError as error:
        _warn_once(folder, error.what)
    return made


@cache
def _warn_once(folder: Path, what: str) -> None:
    log.warning("%s: %s; every run encodes its texts again", folder, what)


# --- one file: named arrays, and a hash of them ---


def _write(path: Path, encoded: EncodedSet, kind: AnyKind) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    for whole in (encoded, encoded.windows):
        for field in fields(whole) if whole is not None else ():
            if isinstance(array := getattr(whole, field.name), np.ndarray):
                arrays[field.name] = np.ascontiguousarray(array)
    with atomic_path(path) as temporary, safetensors_errors():
        save_file(arrays, temporary, metadata={"kind": kind.name, "sha256": _hash(arrays)})
    make_room_after(path)


def _read(path: Path, kind: AnyKind) -> EncodedSet | None:
    """Read the encoded set of a file, or return None if the file is missing or damaged."""
    try:
        with safetensors_errors(), safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s: cannot be read (%s); it is rebuilt", path, error)
        return None
    if metadata.get("sha256") != _hash(arrays) or metadata.get("kind") != kind.name:
        log.warning("%s: is damaged; it is rebuilt", path)
        return None
    names = [field.name for field in fields(QuestionWindows)]
    mark_used(path)
    windows = QuestionWindows(*(arrays.pop(name) for name in names)) if names[0] in arrays else None
    return EncodedSet(unit=kind.unit, windows=windows, **arrays)


def _hash(arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()

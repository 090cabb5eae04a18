"""Teachers' scores of a training set: computed once, cached on disk in 16 bits, averaged over the teachers.

Each teacher and set has one file, named by a hash of both, so that runs with other seeds reuse it.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.core.cache import cached_array, caching_array
from bertsmith.core.errors import UserError
from bertsmith.finetuning.assignment import hashes_of_files
from bertsmith.finetuning.splits import EncodedSplit, encoded_split
from bertsmith.inference.loaded_model import Precision, load_task_model
from bertsmith.inference.model_path import model_folder
from bertsmith.inference.task_model import TaskModel
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.encoder_config import EncoderConfig
from bertsmith.model.network import Network
from bertsmith.recipe.distill_section import TaskDistillSection
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.task_config import TaskConfig

Scores = NDArray[np.float32]
LARGEST_HALF = 65_504.0

log = logging.getLogger("bertsmith")


@dataclass(frozen=True, slots=True)
class Teachers:
    """Models that were fine-tuned for the task before, with the cache folders of their scores."""

    names: Sequence[str]
    config: TaskConfig
    """Task config of the student."""
    device: torch.device
    precision: Precision
    encodings: Path
    scores: Path

    def taught(self, split: EncodedSplit, student: Network) -> EncodedSplit:
        """Return a training set with the mean of all teachers' scores."""
        mean = np.mean([self._scores(name, split, student) for name in self.names], axis=0)
        teacher = _compact(np.asarray(mean, np.float32), self.config)
        return replace(split, encoded=replace(split.encoded, teacher=teacher))

    def _scores(self, name: str, split: EncodedSplit, student: Network) -> Scores:
        teacher = load_task_model(Path(name).expanduser(), device=str(self.device), precision=self.precision)
        _check_teacher(name, teacher, self.config, student)
        theirs = encoded_split(split.examples, self.config, teacher.tokenizer, cache=self.encodings).encoded
        file = self.scores / f"{_key(name, theirs, teacher, self.precision)}.npy"
        return aligned(_cached(file, theirs, teacher), theirs, split.encoded, where=name)


def aligned(scores: Scores, theirs: EncodedSet, ours: EncodedSet, *, where: str) -> Scores:
    """Return scores in the order of the student's encoding; raise if token tasks have other tokens."""
    if ours.unit == "word":
        rows, others = (np.lexsort(each.words_P2.T[::-1]) for each in (ours, theirs))
        if np.array_equal(ours.words_P2[rows], theirs.words_P2[others]):
            in_order = np.empty_like(scores)
            in_order[rows] = scores[others]
            return in_order
    elif ours.unit != "token" or np.array_equal(ours.tokens_T, theirs.tokens_T):
        return scores
    what = "cuts texts into other tokens than the student, but the task is about tokens"
    raise UserError(what, where=where, remedy="distil into a student with the same vocabulary")


def _check_teacher(name: str, teacher: TaskModel, config: TaskConfig, student: Network) -> None:
    """Raise if a teacher was trained for another task or cannot read its texts; warn if it is smaller."""
    known = teacher.config
    if (known.kind.name, known.labels) != (config.kind.name, config.labels):
        what = f"was trained for {_described(known)}, not for {_described(config)}"
        raise UserError(what, where=name, remedy="give a teacher of the same task and labels")
    network = teacher.objective.scorer.network
    assert isinstance(network, Network)
    if config.text.longest > network.config.positions:
        what = f"takes texts of at most {network.config.positions} tokens, not {config.text.longest}"
        raise UserError(what, where=name, remedy=f"use `text.longest={network.config.positions}`")
    ours, theirs = (_encoder_weights(each.config) for each in (student, network))
    if theirs < ours:
        sizes = f"{ours:,} encoder weights, more than its teacher ({theirs:,})"
        log.warning("%s: the student has %s", name, sizes)


def _described(config: TaskConfig) -> str:
    shown = ", ".join(config.labels[:4]) + (", ..." if len(config.labels) > 4 else "")
    return f"{config.task} ({config.kind.name}{': ' if shown else ''}{shown})"


def _encoder_weights(config: EncoderConfig) -> int:
    """Return the number of weights of an encoder, without adapters."""
    # Built again on the meta device: the student may have adapters already, and a teacher quantised weights.
    with torch.device("meta"):
        encoder = architecture_of(config.model_type).build_encoder(config)
    return sum(each.numel() for each in encoder.parameters())


def _key(name: str, encoded: EncodedSet, teacher: TaskModel, precision: Precision) -> str:
    files = hashes_of_files(model_folder(Path(name).expanduser()))
    told = [sorted(files.items()), teacher.config.model_dump_json(), teacher.device.type, precision]
    digest = hashlib.sha256(repr(told).encode())
    for array in (encoded.tokens_T, encoded.segments_T, encoded.starts_N1, encoded.items_M1, encoded.rows_P):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _cached(file: Path, encoded: EncodedSet, teacher: TaskModel) -> Scores:
    """Return the cached scores of a file; if it is missing or damaged, compute and cache them."""
    kept = cached_array(file)
    if kept is not None:
        return kept.astype(np.float32)
    scores = teacher.logits(encoded)
    held = _compact(scores, teacher.config)
    try:
        with caching_array(file) as temporary, temporary.open("wb") as opened:
            np.save(opened, held)
    except UserError as error:
        log.warning("%s: %s; every run computes the scores again", file.parent, error.what)
    return held.astype(np.float32)


def _compact(scores: Scores, config: TaskConfig) -> Scores | NDArray[np.float16]:
    """Return the scores in 16 bits, enough for a softmax; scores of numeric tasks stay in 32 bits."""
    return scores if config.kind.numeric else scores.clip(-LARGEST_HALF, LARGEST_HALF).astype(np.float16)


def teacher_note(distill: TaskDistillSection, examples: Sequence[object]) -> list[str]:
    """Return a note about distillation for the user; empty without teachers."""
    if not distill.teachers:
        return []
    several = f"the mean of {len(distill.teachers)} teachers" if len(distill.teachers) > 1 else "a teacher"
    return [
        f"distillation: {distill.soft_weight:g} x the scores of {several} for {len(examples):,} examples, at "
        f"a temperature of {distill.temperature:g}, + {1 - distill.soft_weight:g} x the labels"
    ]

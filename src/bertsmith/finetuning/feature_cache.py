"""States of a frozen encoder, computed once per split and cached on disk, so that steps skip the encoder.

Each layer has one file, named by a hash of the encoder and the tokens: other choices of layers, other seeds
and later runs reuse it. The vectors of a linear probe are one file; its hash includes the head. Shapes: T
tokens of a split, N items or words of it, D width.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from torch import Tensor, nn

from bertsmith.core.arrays import open_array
from bertsmith.core.cache import cached_array, caching_array
from bertsmith.core.errors import UserError
from bertsmith.core.progress import progress_bar
from bertsmith.features.bilstm import BiLstmScorer
from bertsmith.features.layer_states import encoder_hash
from bertsmith.inference.engine import batching_for, in_streams
from bertsmith.inference.task_model import GPU_MULTIPLE, TaskModel
from bertsmith.model.heads import OutputHead
from bertsmith.tasks.batches import Numbers, TaskBatch, ordered_batches, token_rows
from bertsmith.tasks.encoded import EncodedSet
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.training.trainer import autocast

States = NDArray[np.float32]
MOST_OF_FREE_DISK = 0.5

log = logging.getLogger("bertsmith")


def cached_states(encoded: EncodedSet, model: TaskModel, folder: Path) -> tuple[States, ...]:
    """Return the states of each token of a split [T, D], a memory map for each layer that the scorer reads.

    Return nothing if the disk is too full for them: the encoder then runs at every step.
    """
    scorer = model.objective.scorer
    assert isinstance(scorer, BiLstmScorer)
    place, shape = folder / _key(encoded, model, scorer), (len(encoded.tokens_T), scorer.network.config.width)
    files = {number: place / f"layer-{number:02d}.npy" for number in scorer.layers}
    kept = {number: cached_array(file) for number, file in files.items()}
    missing = {number: files[number] for number, states_TD in kept.items() if states_TD is None}
    try:
        if missing and not _fits(folder, len(missing) * shape[0] * shape[1] * np.dtype(np.float32).itemsize):
            return ()
        if missing:
            _compute(missing, encoded, model, shape)
        kept |= {number: open_array(file, remedy="remove it") for number, file in missing.items()}
    except FileNotFoundError:  # another process has cleared the cache
        return ()
    except UserError as error:
        _warn_once(f"{folder}: {error.what}; the encoder runs at every step")
        return ()
    return tuple(each for each in kept.values() if each is not None)


def cached_vectors(encoded: EncodedSet, model: TaskModel, folder: Path) -> States:
    """Return the inputs of the last layer of a model's head [N, D]: words, or the means of texts' windows."""
    scorer = model.objective.scorer
    assert isinstance(scorer, NetworkScorer)
    head = scorer.network.heads[scorer.head]
    assert isinstance(head, OutputHead)
    output = head.output
    head.output = _Unscored(output.in_features, output.out_features, device="meta", dtype=output.weight.dtype)
    try:
        file = folder / f"{_key(encoded, model, scorer)}.npy"
        vectors_ND = cached_array(file)
        if vectors_ND is None:
            vectors_ND = model.logits(encoded)
            _keep(vectors_ND, file)
    finally:
        head.output = output
    return vectors_ND


class _Unscored(nn.Linear):
    """Replacement for a head's last layer that returns the inputs of that layer."""

    def forward(self, states: Tensor) -> Tensor:
        return states


def _keep(vectors_ND: States, file: Path) -> None:
    """Write vectors for the next run; warn if this fails, since that run can compute them again."""
    try:
        if _fits(file.parent, vectors_ND.nbytes):
            with caching_array(file) as temporary, temporary.open("wb") as written:
                np.save(written, vectors_ND)
    except UserError as error:
        _warn_once(f"{file}: {error.what}; the vectors are not kept")


def _key(encoded: EncodedSet, model: TaskModel, scorer: BiLstmScorer | NetworkScorer) -> str:
    digest = hashlib.sha256(encoder_hash(scorer.network).encode())
    if isinstance(scorer, NetworkScorer):  # vectors depend on the head, too
        head = model.config.head
        digest.update(f"{scorer.head} {head.pooling} {head.cls}".encode())
        for name, tensor in sorted(scorer.network.heads.state_dict().items()):
            if not tensor.is_meta:
                digest.update(f"{name} {tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().float().contiguous().numpy().data)
    digest.update(f"{model.device.type} {model.precision}".encode())
    arrays = (encoded.tokens_T, encoded.segments_T, encoded.starts_N1)
    for array in arrays if isinstance(scorer, BiLstmScorer) else (*arrays, encoded.items_M1, encoded.rows_P):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _fits(folder: Path, needed: int) -> bool:
    """True if the disk has room for this many bytes; warn if not."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if needed <= free * MOST_OF_FREE_DISK:
        return True
    _warn_once(
        f"{folder}: features would take {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free; "
        "the encoder runs at every step"
    )
    return False


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _compute(
    files: Mapping[int, Path], encoded: EncodedSet, model: TaskModel, shape: tuple[int, int]
) -> None:
    """Run the encoder once over a split and write each layer's file, all or none."""
    scorer, numbers = model.objective.scorer, list(files)
    assert isinstance(scorer, BiLstmScorer)
    encoder = scorer.network.encoder

    def states(numbered: tuple[TaskBatch, Numbers]) -> tuple[list[States], Numbers]:
        batch, items = numbered
        # no_grad and autocast apply to one thread only, and each stream has its own.
        with torch.no_grad(), autocast(model.device, model.precision):
            every = encoder.hidden_states(batch.inputs.to(model.device))
        return [every[number].float().cpu().numpy() for number in numbers], items

    cut = batching_for(shape[0], model.device)
    multiple = GPU_MULTIPLE if model.device.type == "cuda" else 1
    batches = ordered_batches(encoded, micro_tokens=cut.tokens, multiple=multiple)
    with ExitStack() as written, progress_bar("computing features", encoded.items) as advance:
        temporary = [written.enter_context(caching_array(file)) for file in files.values()]
        maps: Sequence[States] = [
            open_memmap(path, mode="w+", dtype=np.float32, shape=shape) for path in temporary
        ]
        for found, items in in_streams(states, batches, streams=cut.streams):
            rows_T = token_rows(encoded, items)
            for map_TD, states_TD in zip(maps, found, strict=True):
                map_TD[rows_T] = states_TD[: len(rows_T)]  # filler is at the end
            advance(len(items))
        del maps  # closes the maps, before the files take their names

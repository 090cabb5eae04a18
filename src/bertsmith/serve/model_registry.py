"""The models of a server: their abilities are known from the start, their weights are loaded on first use.

Routes see a `ServedModel`. In a server of one process it is a `LocalModel` with its `BatchQueue`; in an HTTP
process it passes requests on to the model process (`serve.remote_models`).
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bertsmith.core.errors import UserError
from bertsmith.core.steps import Steps
from bertsmith.inference.adapter_folder import base_folder
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.model_path import is_adapter, model_folder
from bertsmith.inference.outputs import ABILITIES
from bertsmith.inference.text_reader import Reader
from bertsmith.model.folder.sentence_modules import SentenceModules
from bertsmith.model.transformer.transformer_config import with_heads
from bertsmith.serve.api_errors import ApiError
from bertsmith.serve.batching import BatchKey, BatchQueue, BatchReport
from bertsmith.serve.operations import OPERATIONS
from bertsmith.serve.server_config import ServerConfig
from bertsmith.tasks.kinds.registry import KINDS

MAX_NAME = 60
"""Maximum length of a quoted name."""
OnBatch = Callable[[str, BatchReport], None]
"""Function called with each batch that a model has computed."""

log = logging.getLogger("bertsmith.serve")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a model that are known without its weights."""

    abilities: tuple[str, ...]
    labels: tuple[str, ...]
    mask: str | None
    """The mask token, as written in a text."""
    takes_pairs: bool
    takes_single: bool
    """True if it accepts single texts; a model that bertsmith did not fine-tune accepts both forms."""
    is_finetuned: bool
    """True if its folder decides what happens to long texts."""
    layers: int
    heads: int | None
    width: int
    max_tokens: int
    """Number of tokens of the longest text that it accepts."""
    sentence: SentenceModules
    """Pooling, normalisation and prompts for vectors of texts."""
    modified: int
    """Time of the last change of its folder, in seconds since 1970."""


class PredictionQueue(Protocol):
    """The queue of requests for a model."""

    @property
    def is_full(self) -> bool:
        """True if a request as long as the average waiting item would be rejected."""

    def retry_seconds(self) -> int:
        """Return the seconds until there should be room again."""

    async def check_in_time(self, wanted: int, *, since: float) -> None:
        """Reject a request, begun at `since`, if `wanted` more tokens cannot be computed in time."""

    async def predict(
        self, key: BatchKey, inputs: Sequence[Any], tokens: Sequence[int], *, admitted: bool = False
    ) -> list[Any]:
        """Return the result of each input; cancellation removes inputs that have not begun."""


class ServedModel(Protocol):
    """A model as requests see it."""

    @property
    def name(self) -> str:
        """Name of the model in requests."""

    @property
    def info(self) -> ModelInfo:
        """Properties that are known without the weights."""

    @property
    def queue(self) -> PredictionQueue:
        """The queue of its requests."""

    @property
    def is_loaded(self) -> bool:
        """True if its weights are in memory."""

    async def reader(self) -> Reader:
        """Return the reader that tokenizes texts for the model."""

    def close(self) -> None:
        """Stop computing."""


class OpenedModels:
    """Opens the folders of a server; a base that several of them share is loaded only once, and kept."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        folders = [model_folder(folder) for folder in config.models.values()]
        if config.base is not None and not any(map(is_adapter, folders)):
            raise UserError("none of the models is an adapter", where="--base", remedy="remove it")
        adapters = Counter(self._base_of(folder) for folder in folders if is_adapter(folder))
        standing = Counter(folder.resolve() for folder in folders if not is_adapter(folder))
        # A base with a single adapter is merged with it, which computes faster; 8-bit weights do not support
        # adapters.
        several = {base for base, count in adapters.items() if count + standing[base] > 1}
        self._shared = several if config.precision != "int8" else set[Path]()
        self._bases: dict[Path, Bert] = {}
        self._lock = threading.Lock()

    def open(self, folder: Path) -> Bert:
        """Return the model of a folder, alone or over a base that it shares with others."""
        base = self._base_of(folder) if is_adapter(folder) else folder.resolve()
        if base not in self._shared:
            return self._load(folder)
        with self._lock:
            if base not in self._bases:
                self._bases[base] = self._load(base)
                # Packed now: two threads that need it at once would each pack the weights.
                _ = self._bases[base].engine
        return self._bases[base].with_adapter(folder) if is_adapter(folder) else self._bases[base]

    def _base_of(self, adapter: Path) -> Path:
        return base_folder(adapter, given=self._config.base).resolve()

    def _load(self, folder: Path) -> Bert:
        base = self._config.base if is_adapter(folder) else None
        bert = load(folder, device=self._config.device, precision=self._config.precision, base=base)
        bert.warm_up()
        if "fill" in bert.abilities:
            bert.tokenizer.prepare_masks()
        return bert


class LocalModel:
    """A model folder, its weights once they are needed, and its queue."""

    def __init__(
        self, name: str, folder: Path, config: ServerConfig, on_batch: OnBatch, *, opened: OpenedModels
    ) -> None:
        self.name, self._folder, self._opened = name, model_folder(folder), opened
        self._load_lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"model-{name}")
        self._bert: Bert | None = opened.open(
            self._folder
        )  # report a wrong folder at the start, not at the first request
        self.info, self.tokenizer = info_of(self._bert, self._folder), self._bert.tokenizer
        self.queue = BatchQueue(
            self._predict,
            self._thread,
            limits=config.limits,
            on_batch=lambda report: on_batch(name, report),
            in_steps=self._in_steps,
        )

    @property
    def is_loaded(self) -> bool:
        """True if its weights are in memory."""
        return self._bert is not None

    async def reader(self) -> Reader:
        """Return the reader that tokenizes texts for the model; it is loaded with the weights."""
        return (await self.loaded()).reader

    async def loaded(self) -> Bert:
        """Return the model; load it if necessary, once for all requests."""
        if self._bert is not None:
            return self._bert
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.load)

    def load(self) -> Bert:
        """Return the model; load it if necessary."""
        with self._load_lock:
            if self._bert is None:
                try:
                    self._bert = self._opened.open(self._folder)
                except UserError as error:
                    log.error("%s cannot be loaded: %s", self.name, error.line())
                    raise ApiError(503, f"the model {self.name} cannot be loaded; see its log") from error
            return self._bert

    def release(self) -> None:
        """Release the weights until they are needed again."""
        self._bert = None

    def close(self) -> None:
        """End the thread once it is idle."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _predict(self, key: BatchKey, inputs: Sequence[Any]) -> Sequence[Any]:
        return OPERATIONS[key.operation].predict(self.load(), inputs, key.options)

    def _in_steps(self, key: BatchKey, inputs: Sequence[Any]) -> Steps[Sequence[Any]] | None:
        operation = OPERATIONS[key.operation]
        return operation.compute(self.load(), inputs, key.options) if operation.in_steps else None


def open_models(config: ServerConfig, on_batch: OnBatch) -> list[LocalModel]:
    """Open each model of a server once; keep only the first in memory."""
    models: list[LocalModel] = []
    opened = OpenedModels(config)
    for name, folder in config.models.items():
        models.append(LocalModel(name, folder, config, on_batch, opened=opened))
        if len(models) > 1:  # the first remains: one model, the usual case, answers at once
            models[-1].release()
    return models


class ModelRegistry:
    """All models of a server, in the order they were named."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def with_ability(self, name: str | None, *abilities: str) -> ServedModel:
        """Return the named model, or by default the first one, that has one of these abilities."""
        wanted = " or ".join(ABILITIES[ability] for ability in abilities)
        if name is None:
            found = [model for model in self if set(abilities) & set(model.info.abilities)]
            if not found:
                raise ApiError(422, f"no model of this server can {wanted}; add one with --model NAME=FOLDER")
            return found[0]
        model = self.get(name)
        if not set(abilities) & set(model.info.abilities):
            can = ", ".join(ABILITIES[each] for each in model.info.abilities)
            raise ApiError(422, f"the model {name} cannot {wanted}; it can {can}")
        return model

    def get(self, name: str) -> ServedModel:
        """Return the model of this name."""
        if name not in self._models:
            message = f"this server does not have a model {name[:MAX_NAME]!r}; GET /models lists its models"
            raise ApiError(404, message, error_type="model_not_found")
        return self._models[name]

    def pair_scorer(self, name: str | None) -> ServedModel | None:
        """Return the model of this name, or by default the first one, that scores pairs, or None."""
        candidates = [model for model in self if name in (None, model.name)]
        fit = (each for each in candidates if "score" in each.info.abilities and each.info.takes_pairs)
        return next(fit, None)

    @property
    def are_full(self) -> bool:
        """True if every model would reject another request."""
        return all(model.queue.is_full for model in self._models.values())

    def retry_seconds(self) -> int:
        """Return the seconds until the first model should have room again."""
        return min(model.queue.retry_seconds() for model in self._models.values())

    def close(self) -> None:
        """End the thread of every model."""
        for model in self._models.values():
            model.close()


def info_of(bert: Bert, folder: Path) -> ModelInfo:
    """Return the properties of a model that are known without its weights."""
    config = bert.model.network.config
    return ModelInfo(
        abilities=tuple(each for each in bert.abilities if each != "extend"),  # no route continues texts
        labels=_labels_of(bert),
        mask=_mask_of(bert),
        takes_pairs=bert.finetuned is None or bert.finetuned.config.pairs,
        takes_single=bert.finetuned is None or not bert.finetuned.config.pairs,
        is_finetuned=bert.finetuned is not None,
        layers=config.layers,
        heads=with_heads(config).heads if bert.model.network.encoder.heads else None,
        width=config.width,
        max_tokens=bert.reader.longest,
        sentence=bert.model.sentence,
        modified=int(folder.stat().st_mtime),
    )


def _labels_of(bert: Bert) -> tuple[str, ...]:
    """Return the classes or tags of a model, or () if it lacks a head for them."""
    if bert.finetuned is not None:
        return bert.finetuned.config.labels
    labelling = {kind.ability for kind in KINDS.values() if kind.min_labels}
    return bert.model.labels() if labelling & set(bert.abilities) else ()


def _mask_of(bert: Bert) -> str | None:
    return bert.tokenizer.mask_token if bert.tokenizer.has_mask else None

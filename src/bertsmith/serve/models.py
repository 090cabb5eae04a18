"""The models of a server: what each can do is known from the start, its weights come with the first use."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith.ground.errors import UserError
from bertsmith.inference.bert import Bert, load
from bertsmith.inference.facts import DOES
from bertsmith.serve.asking import ask, labels_of
from bertsmith.serve.batching import Batch, BatchQueue, Kind
from bertsmith.serve.refusals import Refusal
from bertsmith.serve.settings import Settings

Watch = Callable[[str, Batch], None]
"""Told of each batch that a model has done."""

log = logging.getLogger("bertsmith.serve")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model without its weights."""

    abilities: tuple[str, ...]
    labels: tuple[str, ...]
    mask: str | None
    """How a mask is written."""
    takes_pairs: bool
    takes_single: bool
    """A model that nobody here fine-tuned takes both."""
    layers: int
    heads: int
    width: int
    longest: int
    """Tokens of the longest text it takes."""
    modified: int
    """When its folder was last written, in seconds since 1970."""


class ServedModel:
    """A model folder, its weights once they were asked for, and what waits for it."""

    def __init__(self, name: str, folder: Path, settings: Settings, watch: Watch) -> None:
        self.name, self._folder, self._settings = name, folder, settings
        self._opening = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"model-{name}")
        self._bert: Bert | None = self._load()  # a wrong folder is told before the first request, not by it
        self.facts = facts_of(self._bert, folder)
        self.queue = BatchQueue(
            self._ask, self._thread, limits=settings.limits, watch=lambda batch: watch(name, batch)
        )

    @property
    def is_loaded(self) -> bool:
        """Whether its weights are in memory."""
        return self._bert is not None

    async def opened(self) -> Bert:
        """The model, loaded now if it was not yet; whoever else asks meanwhile waits for the same one."""
        if self._bert is not None:
            return self._bert
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.open)

    def open(self) -> Bert:
        """The model, loaded now if it was not yet."""
        with self._opening:
            if self._bert is None:
                try:
                    self._bert = self._load()
                except UserError as error:
                    log.error("%s cannot be loaded: %s", self.name, error.line())
                    raise Refusal(503, f"the model {self.name} cannot be loaded; its log says why") from error
            return self._bert

    def release(self) -> None:
        """Let go of the weights until they are asked for."""
        self._bert = None

    def close(self) -> None:
        """Let its thread end once it is idle."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self, kind: Kind, inputs: Sequence[Any]) -> list[Any]:
        return ask(self.open(), kind, inputs)

    def _load(self) -> Bert:
        return load(self._folder, device=self._settings.device, precision=self._settings.precision)


class Models:
    """All models of a server, in the order they were named."""

    def __init__(self, settings: Settings, watch: Watch) -> None:
        self._models: dict[str, ServedModel] = {}
        for name, folder in settings.models.items():
            self._models[name] = ServedModel(name, folder, settings, watch)
            if len(self._models) > 1:  # the first stays: one model, the usual case, answers at once
                self._models[name].release()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def able(self, name: str | None, *abilities: str) -> ServedModel:
        """The model of this name, or without one the first, that has one of these abilities."""
        wanted = " or ".join(DOES[ability] for ability in abilities)
        if name is None:
            found = [model for model in self if set(abilities) & set(model.facts.abilities)]
            if not found:
                raise Refusal(422, f"no model here can {wanted}; one is added with --model NAME=FOLDER")
            return found[0]
        model = self.named(name)
        if not set(abilities) & set(model.facts.abilities):
            can = ", ".join(DOES[each] for each in model.facts.abilities)
            raise Refusal(422, f"the model {name} cannot {wanted}; it can {can}")
        return model

    def named(self, name: str) -> ServedModel:
        """The model of this name."""
        if name not in self._models:
            message = f"there is no model {name!r} here; GET /models lists those there are"
            raise Refusal(404, message, kind="model_not_found")
        return self._models[name]

    def judge_of_pairs(self, name: str | None) -> ServedModel | None:
        """The model of this name, or without one the first, if it gives pairs of texts a number."""
        asked = [model for model in self if name in (None, model.name)]
        fit = (each for each in asked if "score" in each.facts.abilities and each.facts.takes_pairs)
        return next(fit, None)

    @property
    def are_full(self) -> bool:
        """Whether no model would take anything more."""
        return all(model.queue.is_full for model in self._models.values())

    def retry_seconds(self) -> int:
        """When the first of them should have room again."""
        return min(model.queue.retry_seconds() for model in self._models.values())

    def close(self) -> None:
        """Let every model's thread end."""
        for model in self._models.values():
            model.close()


def facts_of(bert: Bert, folder: Path) -> Facts:
    """What there is to know of a model beside its weights."""
    shape = bert.model.network.shape
    return Facts(
        abilities=tuple(bert.abilities),
        labels=labels_of(bert),
        mask=_mask_of(bert),
        takes_pairs=bert.tuned is None or bert.tuned.note.pairs,
        takes_single=bert.tuned is None or not bert.tuned.note.pairs,
        layers=shape.layers,
        heads=shape.heads,
        width=shape.width,
        longest=shape.positions,
        modified=int(folder.stat().st_mtime),
    )


def _mask_of(bert: Bert) -> str | None:
    try:
        return bert.tokenizer.mask_token
    except UserError:  # a tokenizer need not have one
        return None

"""Untrained twins as a control: a finding that random weights show too is not an effect of training."""

from collections.abc import Callable
from typing import TypeVar

import torch

from bertsmith.core.progress import progress_within
from bertsmith.core.seeds import key_of
from bertsmith.inference.loaded_model import Bert
from bertsmith.model.folder.model_folder import Model
from bertsmith.model.network import new_network

INITIALISATIONS = 3

Finding = TypeVar("Finding")


def untrained_twin(bert: Bert, seed: int) -> Bert:
    """Return a model of the same shape with random weights, and a masked-LM head if the original has one."""
    network = bert.model.network
    heads = {"mlm": 0} if "mlm" in bert.heads else {}
    # Drawn on the CPU, so that all devices get the same weights.
    generator = torch.Generator().manual_seed(key_of(seed, "untrained twin") % 2**63)
    fresh = new_network(network.config, heads, generator)
    return Bert(Model(fresh), bert.tokenizer, device=str(bert.engine.device))


def of_untrained(bert: Bert, analysis: Callable[[Bert], Finding], *, seed: int) -> list[Finding]:
    """Run an analysis on each of three random initialisations."""
    found = []
    for number in range(INITIALISATIONS):
        with progress_within(f"untrained {number + 1} of {INITIALISATIONS}"):
            found.append(analysis(untrained_twin(bert, seed + number)))
    return found

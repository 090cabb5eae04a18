"""Keys of recipes that decide neither what a run learns nor how well, beyond rounding."""

from typing import NamedTuple


class Idle(NamedTuple):
    """The two situations for a key to be irrelevant."""

    in_cells: bool
    """True if runs that differ only in this key are one cell of a study."""
    at_resume: bool
    """True if the key may change when a run resumes."""


EVERYWHERE, IN_CELLS, AT_RESUME = Idle(True, True), Idle(True, False), Idle(False, True)
PRETRAINING_KEYS = {
    "name": IN_CELLS,
    "batch.micro_tokens": IN_CELLS,
    "run.recompute": IN_CELLS,
    "run.loader_workers": EVERYWHERE,
    "run.log_every_steps": EVERYWHERE,
    "run.evaluate_every_steps": EVERYWHERE,
    "run.save_every_steps": EVERYWHERE,
    "run.save_every_minutes": EVERYWHERE,
    "run.keep_last": EVERYWHERE,
    "run.keep_at": EVERYWHERE,
    "run.patience_seconds": EVERYWHERE,
    "run.evaluation_sequences": AT_RESUME,
    "run.device": AT_RESUME,
    "run.parallel": AT_RESUME,
}
FINETUNING_KEYS = {
    "run.micro_tokens": IN_CELLS,
    "run.recompute": IN_CELLS,
    "run.keep_state": EVERYWHERE,
    "run.patience_seconds": EVERYWHERE,
}


def free_at_resume(keys: dict[str, Idle]) -> frozenset[str]:
    """Return the keys that may change when a run resumes."""
    return frozenset(key for key, idle in keys.items() if idle.at_resume)


def idle_in_cells(keys: dict[str, Idle]) -> frozenset[str]:
    """Return the keys that are left out of the key of a cell."""
    return frozenset(key for key, idle in keys.items() if idle.in_cells)

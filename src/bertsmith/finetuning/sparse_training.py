"""Zero weights within a run, as the section `sparse` of its recipe says."""

from copy import deepcopy
from dataclasses import dataclass

from bertsmith.core.files import atomic_path
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.model.folder.tensor_files import write_safetensors
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.training.magnitude import (
    GradualSchedule,
    apply_masks,
    magnitude_masks,
    masks_of,
    prunable_weights,
)
from bertsmith.training.trainer import Progress

EARLY_WEIGHTS = "early.safetensors"
"""File in the folder of a run with the weights of its rewinding step."""


@dataclass
class SparseTraining:
    """The masks of a run, which are also in its weights, and its early weights."""

    run: Run

    def begin(self, at: Progress) -> None:
        """Take the masks from the weights, which are in place; write the weights if no step is taken yet."""
        self.sparse, steps = self.run.recipe.sparse, self.run.budget.steps
        self.weights = prunable_weights(self.run.model.network)
        self.masks = masks_of(self.weights) if self.sparse.has_masks else {}
        if not at.step:
            self._write_early(at, steps)

    def after_launch(self, at: Progress) -> None:
        """Apply the masks, new ones when these are due, and write the weights of the rewinding step."""
        steps = self.run.budget.steps
        if self.sparse.gradual != "off":
            schedule = GradualSchedule(self.sparse.gradual, steps)
            if schedule.is_due(at.step):
                self.masks = magnitude_masks(self.weights, schedule.sparsity(at.step))
        if self.masks:
            apply_masks(self.weights, self.masks)
        self._write_early(at, steps)

    def _write_early(self, at: Progress, steps: int) -> None:
        early_at = self.sparse.early_at
        if early_at == "off" or at.step != rewinding_step(early_at, steps) or not self.run.world.main:
            return
        # In the form of the finished folder, in which the head predicts unscaled numbers.
        scorer = deepcopy(self.run.model.scorer)
        if self.run.scaler is not None:
            self.run.scaler.fold_into(scorer)
        assert isinstance(scorer, NetworkScorer), "a rule of the recipe"
        tensors = {name: each.cpu().contiguous() for name, each in scorer.network.state_dict().items()}
        with atomic_path(self.run.folder.path / EARLY_WEIGHTS) as fresh:
            write_safetensors(fresh, tensors)


def rewinding_step(fraction: float, steps: int) -> int:
    """Return the step at this fraction of a schedule of this many steps."""
    return min(round(fraction * steps), steps - 1)

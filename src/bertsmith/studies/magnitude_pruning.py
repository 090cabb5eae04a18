"""Unstructured pruning as a job: gradually while a model is fine-tuned, or after it, with rewinding.

In this order: the request, the job, and its changes to runs. After a training the smallest weights are set to
zero, the others are trained again by one or several methods, and the best model is kept. Several sparsities
share the first training.
"""

import shutil
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_path, read_json, write_json
from bertsmith.finetuning.assignment import (
    EXAMPLES,
    Assignment,
    check_same_examples,
    hashes_of,
)
from bertsmith.finetuning.finetune import FinetuningResult, Preparation, finetune
from bertsmith.finetuning.finetuning_setup import Run
from bertsmith.finetuning.splits import read_splits
from bertsmith.inference.loaded_model import load
from bertsmith.inference.task_model import task_model_of
from bertsmith.model.tensor_files import read_safetensors, write_safetensors
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.shrink.magnitude import (
    apply_masks,
    cubic_sparsity,
    magnitude_masks,
    masks_of,
    prunable_weights,
    published_masks,
    sparsity_of,
)
from bertsmith.shrink.slicing import blocks_to_prune
from bertsmith.studies.pruning import (
    Metrics,
    check_same_request,
    copy_model,
    network_of,
    plain_request,
    write_pruned,
)
from bertsmith.studies.sweep import Stopped, best_of, check_no_stop, with_values
from bertsmith.tasks.objective import NetworkScorer
from bertsmith.tasks.task import Task
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.distributed import refuse_several_processes
from bertsmith.training.run_folder import RunFolder
from bertsmith.training.trainer import Progress

ASSIGNMENT, RESULT, WORK, MASK_FILE = "pruning.json", "result.json", "work", "mask.safetensors"
Retraining = Literal["weights", "rate", "finetune"]
RETRAINING: dict[Retraining, str] = {
    "weights": "weights and schedule go back to the rewinding step (Frankle et al. 2020)",
    "rate": "the schedule goes back, the weights stay (Renda et al. 2020)",
    "finetune": "the weights stay, and learn at a tenth of the peak rate",
}
FINAL_RATE = 0.1
"""Learning rate of "finetune", as a fraction of the peak.

Published fine-tuning continues at the last rate of the schedule, which is 0 for a linear decay to 0."""
GRADUAL = (0.1, 0.7)
"""Fractions of a run between which weights are pruned: after the warm-up, with time to recover at the end."""
UPDATES = 100
"""Number of intervals of a run; masks are recomputed after each interval that is within GRADUAL."""


# ---- the request


@dataclass(frozen=True, slots=True)
class MagnitudeRequest:
    """A model, a task, and the fractions of the layers' weights to set to zero, one model for each."""

    task: Task
    model: Path
    data: Path
    out: Path
    recipe: FinetuningRecipe
    sparsities: tuple[float, ...]
    rewind: float | None = None
    """Fraction of the schedule to rewind to; None prunes gradually within one run."""
    retraining: tuple[Retraining, ...] = ("weights",)
    rounds: int = 1
    """Number of steps in which a trained model is pruned, each followed by a training."""
    skip_bad: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the settings, without examples, that an existing run must share to be resumed."""
        own = {key: getattr(self, key) for key in ("rewind", "retraining", "rounds", "skip_bad")}
        own["sparsity"] = self.sparsities if len(self.sparsities) > 1 else self.sparsities[0]
        return plain_request(self.task, self.recipe, self.model, self.data, own)

    def check(self) -> None:
        """Raise if the request is not possible."""
        for sparsity in self.sparsities:
            if not 0 < sparsity < 1:
                what, remedy = f"{sparsity:g} of the weights cannot be zero", "choose one such as 0.7"
                raise UserError(what, key="sparsity", remedy=remedy)
        if self.rewind is None and len(self.sparsities) > 1:
            what = "while a model is trained its weights go to one sparsity"
            raise UserError(what, key="sparsity", remedy="give one, or add `rewind=0.1`")
        if self.rewind is not None and not 0 <= self.rewind < 1:
            what, remedy = f"{self.rewind:g} is no part of a run to go back to", "choose one such as 0.1"
            raise UserError(what, key="rewind", remedy=remedy)
        if self.recipe.run.minutes != "off":
            what = "which weights go follows from the steps of a run, which minutes would change"
            raise UserError(what, key="run.minutes", remedy="give `run.epochs` instead")
        if self.recipe.head.encoder != "tuned":
            what = f"the weights of the layers stay as they are (head.encoder = {self.recipe.head.encoder})"
            raise UserError(what, key="sparsity", remedy="leave the setting out")
        if self.rewind is None and self.recipe.run.keep == "best":
            what = "the best weights may be some of before all were pruned"
            raise UserError(what, key="run.keep", remedy="leave it out, or give `rewind`")

    @property
    def places(self) -> dict[float, Path]:
        """Output folder of each sparsity: `out` itself, or a subfolder for each of several."""
        if len(self.sparsities) == 1:
            return {self.sparsities[0]: self.out}
        return {sparsity: self.out / str(sparsity) for sparsity in self.sparsities}


@dataclass(frozen=True, slots=True)
class SparseReport:
    """One training: its name, the fraction of weights that are zero, and the model's metrics."""

    name: str
    sparsity: float
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class SparseResult:
    """The folder of a model, the reports of all trainings, and the name of the kept one."""

    folder: Path
    reports: tuple[SparseReport, ...]
    kept: str


# ---- the job


def prune_by_magnitude(request: MagnitudeRequest, callback: ProgressCallback) -> list[SparseResult]:
    """Prune to each sparsity; a job in the folder resumes, or is reported if it is finished."""
    refuse_several_processes("pruning has one process")
    request.check()
    folder = RunFolder(request.out, ASSIGNMENT, RESULT)
    check_same_request(folder, asked := request.to_json())
    splits = read_splits(request.task, request.data, skip_bad=request.skip_bad)
    check_same_examples(folder, hashes := hashes_of(splits.limited(request.recipe.run.limit).splits))
    if not folder.finished:
        blocks_to_prune(load(request.model, device="cpu").model.network)
        with folder.locked(), StopRequested(callback.on_signal) as stop:
            write_json(folder.config, {**asked, EXAMPLES: hashes})
            job = _Job(request, callback, stop)
            if request.rewind is None:
                job.gradual()
            else:
                job.after_training(request.rewind)
    shutil.rmtree(request.out / WORK, ignore_errors=True)
    return [_result_in(place) for place in request.places.values()]


def _result_in(place: Path) -> SparseResult:
    found = read_json(place / RESULT, remedy="remove the folder and run again")
    return SparseResult(place, tuple(SparseReport(**each) for each in found["reports"]), found["kept"])


@dataclass(frozen=True, slots=True)
class _Job:
    """One start of a job, which may take several."""

    request: MagnitudeRequest
    callback: ProgressCallback
    stop: StopRequested

    # ---- pruning during training

    def gradual(self) -> None:
        """Train once, while more and more weights become zero."""
        request, masks = self.request, GradualMasks(0.0, self.request.sparsities[0])
        trained = self._train(request.out / WORK / "gradual", request.model, request.recipe, masks)
        self._keep_best(request.out, {"gradual": trained}, of=["gradual"])

    # ---- pruning after training

    def after_training(self, rewind: float) -> None:
        """Train once; for each sparsity prune, train again by each method and keep the best."""
        request = self.request
        early = request.out / WORK / "early.safetensors"
        begun = request.out / WORK / "dense"
        dense = self._train(begun, request.model, request.recipe, EarlyWeights(rewind, early))
        for sparsity, place in request.places.items():
            if not (place / RESULT).is_file():
                if len(request.sparsities) > 1:
                    self.callback.on_message(f"sparsity {sparsity:g}")
                found = self._retrained(sparsity, dense, early, rewind)
                last = [f"{method}-{request.rounds}" for method in request.retraining]
                self._keep_best(place, {"dense": dense, **found}, of=last)
            if place != request.out:  # out / WORK has the first training, which others need
                shutil.rmtree(place / WORK, ignore_errors=True)
        if len(request.sparsities) > 1:
            names = [place.name for place in request.places.values()]
            write_json(request.out / RESULT, {"task": request.task.name, "folders": names})

    def _retrained(
        self, sparsity: float, dense: FinetuningResult, early: Path, rewind: float
    ) -> dict[str, FinetuningResult]:
        """Return the result of each method after each of its rounds, by name."""
        found = {}
        for method in self.request.retraining:
            trained = dense.folder
            for number in range(1, self.request.rounds + 1):
                name = f"{method}-{number}"
                place = self.request.places[sparsity] / WORK / name
                zeros = cubic_sparsity(sparsity, number / self.request.rounds)
                initial = _pruned(place / "initial", trained, zeros, early if method == "weights" else None)
                found[name] = self._train(place, initial, self._recipe_of(method), KeptMasks(rewind))
                trained = found[name].folder
        return found

    def _recipe_of(self, method: Retraining) -> FinetuningRecipe:
        recipe = self.request.recipe
        if method != "finetune":
            return recipe
        rate = FINAL_RATE * recipe.optim.peak_lr
        changed = {"optim.schedule": "constant", "optim.warmup_fraction": 0.0, "optim.peak_lr": rate}
        return with_values(recipe, changed)

    def _train(
        self, place: Path, model: Path, recipe: FinetuningRecipe, preparation: Preparation
    ) -> FinetuningResult:
        check_no_stop(self.stop, place.name)
        self.callback.on_message(place.name)
        request = self.request
        # Each of several short runs would be compiled again.
        recipe = with_values(recipe, {"run.compile": "off"})
        where = (model, request.data, place / "tuned")
        assignment = Assignment(request.task, recipe, *where, request.skip_bad)
        result = finetune(assignment, self.callback, preparation=preparation)
        if not result.finished:
            raise Stopped(place.name)
        return result

    # ---- the end

    def _keep_best(self, place: Path, found: dict[str, FinetuningResult], *, of: list[str]) -> None:
        """Keep the best of the runs named in `of`, with its mask, and write the report of all runs."""
        kept = best_of({name: found[name] for name in of}) or of[0]
        networks = {name: load(each.folder, device="cpu").model.network for name, each in found.items()}
        with atomic_path(place / MASK_FILE) as fresh:
            write_safetensors(fresh, published_masks(networks[kept]))
        copy_model(found[kept].folder, place / "model")
        reports = [
            asdict(SparseReport(name, sparsity_of(networks[name]), result.metrics))
            for name, result in found.items()
        ]
        write_json(place / RESULT, {"task": self.request.task.name, "reports": reports, "kept": kept})


def _pruned(folder: Path, trained: Path, sparsity: float, early: Path | None) -> Path:
    """Write a model with the smallest weights of a trained one at zero; the others may be early weights."""
    if not folder.exists():
        bert = load(trained, device="cpu")
        assert bert.finetuned is not None, "it is the model of a run"
        network = network_of(task_model_of(bert.model.network, bert.finetuned, bert.engine))
        weights = prunable_weights(network)
        masks = magnitude_masks(weights, sparsity)
        if early is not None:
            network.load_state_dict(read_safetensors(early, remedy="give `out` a new folder"))
        apply_masks(weights, masks)
        write_pruned(folder, bert, network)
    return folder


# ---- changes to a run


@dataclass(frozen=True, slots=True)
class GradualSchedule:
    """The steps of a run at which masks are recomputed, and the sparsity of each."""

    final: float
    steps: int

    @property
    def last(self) -> int:
        """The last step at which weights are pruned."""
        return max(1, round(GRADUAL[1] * self.steps))

    def is_due(self, taken: int) -> bool:
        """True if masks are recomputed after this many steps."""
        every = max(1, self.steps // UPDATES)
        return GRADUAL[0] * self.steps <= taken <= self.last and (taken % every == 0 or taken == self.last)

    def sparsity(self, taken: int) -> float:
        """Return the fraction of weights that are zero after this many steps."""
        first = GRADUAL[0] * self.steps
        return cubic_sparsity(self.final, (taken - first) / (self.last - first))


@dataclass
class KeptMasks:
    """Keeps zero weights at zero while the others are trained again."""

    rewind: float
    """Fraction of the schedule at which a new run begins."""

    def first_step(self, steps: int) -> int:
        """Return the step to begin at, with its examples and learning rate."""
        return rewinding_step(self.rewind, steps)

    def begin(self, run: Run, _at: Progress, /) -> None:
        """Take the masks from the weights."""
        self.weights = prunable_weights(network_of(run.model))
        self.masks = masks_of(self.weights)

    def after_launch(self, _at: Progress, /) -> None:
        """Apply the masks."""
        apply_masks(self.weights, self.masks)


@dataclass
class GradualMasks(KeptMasks):
    """Sets more and more weights to zero while a model is trained."""

    final: float
    """Sparsity at the end."""

    def begin(self, run: Run, at: Progress, /) -> None:
        """Take the masks from the weights, and the schedule from the run."""
        super().begin(run, at)
        self.schedule = GradualSchedule(self.final, run.budget.steps)

    def after_launch(self, at: Progress, /) -> None:
        """Apply the masks, and compute new ones when these are due."""
        if self.schedule.is_due(at.step):
            self.masks = magnitude_masks(self.weights, self.schedule.sparsity(at.step))
        super().after_launch(at)


@dataclass
class EarlyWeights:
    """Writes the weights of an early step, to which later trainings go back."""

    rewind: float
    file: Path

    def first_step(self, _steps: int, /) -> int:
        """Return 0."""
        return 0

    def begin(self, run: Run, at: Progress) -> None:
        """Write the weights if they are those before the first step."""
        self.run, self.step = run, rewinding_step(self.rewind, run.budget.steps)
        if not at.step:
            self.after_launch(at)

    def after_launch(self, at: Progress) -> None:
        """Write the weights if this is their step."""
        if at.step == self.step:
            _write_weights(self.run, self.file)


def _write_weights(run: Run, file: Path) -> None:
    # In the form of the finished folder, in which the head predicts unscaled numbers.
    scorer = deepcopy(run.model.objective.scorer)
    if run.scaler is not None:
        run.scaler.fold_into(scorer)
    assert isinstance(scorer, NetworkScorer), "the request was checked"
    weights = {name: tensor.cpu().contiguous() for name, tensor in scorer.network.state_dict().items()}
    with atomic_path(file) as fresh:
        write_safetensors(fresh, weights)


def rewinding_step(rewind: float, steps: int) -> int:
    """Return the step at this fraction of a schedule of this many steps."""
    return min(round(rewind * steps), steps - 1)

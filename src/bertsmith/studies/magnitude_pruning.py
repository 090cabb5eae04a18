"""Unstructured pruning as a job: gradually while a model is fine-tuned, or after it, with rewinding.

After a training the smallest weights are set to zero, the others are trained again by one or several methods,
and the best model is kept. Several sparsities share the first training. The recipe's section `sparse` defines
the handling of zero weights in each training.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bertsmith.core.files import atomic_path, read_json, write_json
from bertsmith.finetuning.assignment import (
    EXAMPLES,
    Assignment,
    hashes_of,
)
from bertsmith.finetuning.finetune import FinetuningResult, finetune
from bertsmith.finetuning.sparse_training import EARLY_WEIGHTS
from bertsmith.finetuning.splits import read_splits
from bertsmith.inference.loaded_model import load
from bertsmith.inference.task_model import task_model_of
from bertsmith.model.folder.tensor_files import read_safetensors, write_safetensors
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.shrink.slicing import blocks_to_prune
from bertsmith.studies.pruning import (
    Metrics,
    copy_model,
    plain_request,
    write_pruned,
)
from bertsmith.studies.sweep import Stopped, best_of, check_no_stop, with_values
from bertsmith.tasks.task import Task
from bertsmith.training.callbacks import ProgressCallback, StopRequested
from bertsmith.training.distributed import refuse_several_processes
from bertsmith.training.magnitude import (
    apply_masks,
    cubic_sparsity,
    magnitude_masks,
    prunable_weights,
    published_masks,
    sparsity_of,
)
from bertsmith.training.run_folder import RunFolder

ASSIGNMENT, RESULT, WORK, MASK_FILE = "pruning.json", "result.json", "work", "mask.safetensors"
Retraining = Literal["weights", "rate", "finetune"]
RETRAINING: dict[Retraining, str] = {
    "weights": "weights and schedule are rewound to the rewinding step (Frankle et al. 2020)",
    "rate": "only the schedule is rewound (Renda et al. 2020)",
    "finetune": "nothing is rewound: training at a tenth of the peak rate",
}
FINAL_RATE = 0.1
"""Learning rate of "finetune", as a fraction of the peak.

Published fine-tuning continues at the last rate of the schedule, which is 0 for a linear decay to 0."""


# ---- the request


@dataclass(frozen=True, slots=True)
class MagnitudeRequest:
    """A model, a task, and the fractions of the layers' weights to set to zero, one model for each."""

    task: Task
    model: Path
    data: Path
    out: Path
    recipe: FinetuningRecipe
    """Recipe of the first training: with sparse.gradual the only one, with sparse.early_at rewound to."""
    sparsities: tuple[float, ...]
    retraining: tuple[Retraining, ...] = ("weights",)
    rounds: int = 1
    """Number of pruning steps of a trained model, each followed by a training."""
    skip_bad: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the settings, without examples, that an existing run must share to be resumed."""
        own = {key: getattr(self, key) for key in ("sparsities", "retraining", "rounds", "skip_bad")}
        return plain_request(self.task, self.recipe, self.model, self.data, own)

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
    folder = RunFolder(request.out, ASSIGNMENT, RESULT)
    folder.check_same_run(asked := request.to_json())
    splits = read_splits(request.task, request.data, skip_bad=request.skip_bad)
    splits = splits.limited(request.recipe.run.limit)
    folder.check_same_run(hashes := {EXAMPLES: hashes_of(splits.splits)})
    if not folder.finished:
        blocks_to_prune(load(request.model, device="cpu").model.network)
        with folder.locked(), StopRequested(callback.on_signal) as stop:
            write_json(folder.config, {**asked, **hashes})
            job = _Job(request, callback, stop)
            if request.recipe.sparse.gradual != "off":
                job.gradual()
            else:
                job.after_training()
    shutil.rmtree(request.out / WORK, ignore_errors=True)
    return [_result_in(place) for place in request.places.values()]


def _result_in(place: Path) -> SparseResult:
    found = read_json(place / RESULT, remedy="remove the folder and run again")
    return SparseResult(place, tuple(SparseReport(**each) for each in found["reports"]), found["kept"])


@dataclass(frozen=True, slots=True)
class _Job:
    """One start of a job; a job may need several."""

    request: MagnitudeRequest
    callback: ProgressCallback
    stop: StopRequested

    # ---- pruning during training

    def gradual(self) -> None:
        """Train once, while more and more weights become zero."""
        request = self.request
        trained = self._train(request.out / WORK / "gradual", request.model, request.recipe)
        self._keep_best(request.out, {"gradual": trained}, of=["gradual"])

    # ---- pruning after training

    def after_training(self) -> None:
        """Train once; for each sparsity prune, train again by each method and keep the best."""
        request = self.request
        dense = self._train(request.out / WORK / "dense", request.model, request.recipe)
        for sparsity, place in request.places.items():
            if not (place / RESULT).is_file():
                if len(request.sparsities) > 1:
                    self.callback.on_message(f"sparsity {sparsity:g}")
                found = self._retrained(sparsity, dense)
                last = [f"{method}-{request.rounds}" for method in request.retraining]
                self._keep_best(place, {"dense": dense, **found}, of=last)
            if place != request.out:  # out / WORK has the first training, which others need
                shutil.rmtree(place / WORK, ignore_errors=True)
        if len(request.sparsities) > 1:
            names = [place.name for place in request.places.values()]
            write_json(request.out / RESULT, {"task": request.task.name, "folders": names})

    def _retrained(self, sparsity: float, dense: FinetuningResult) -> dict[str, FinetuningResult]:
        """Return the result of each method after each of its rounds, by name."""
        found = {}
        for method in self.request.retraining:
            trained = dense.folder
            for number in range(1, self.request.rounds + 1):
                name = f"{method}-{number}"
                place = self.request.places[sparsity] / WORK / name
                zeros = cubic_sparsity(sparsity, number / self.request.rounds)
                early = dense.folder / EARLY_WEIGHTS if method == "weights" else None
                initial = _pruned(place / "initial", trained, zeros, early)
                found[name] = self._train(place, initial, self._recipe_of(method))
                trained = found[name].folder
        return found

    def _recipe_of(self, method: Retraining) -> FinetuningRecipe:
        recipe = self.request.recipe
        begin_at = recipe.sparse.early_at
        changed = {"sparse.early_at": "off", "sparse.keep_zeros": True, "sparse.begin_at": begin_at}
        if method == "finetune":
            rate = FINAL_RATE * recipe.optim.peak_lr
            changed |= {"optim.schedule": "constant", "optim.warmup_fraction": 0.0, "optim.peak_lr": rate}
        return with_values(recipe, changed)

    def _train(self, place: Path, model: Path, recipe: FinetuningRecipe) -> FinetuningResult:
        check_no_stop(self.stop, place.name)
        self.callback.on_message(place.name)
        request = self.request
        # Each of several short runs would be compiled again.
        recipe = with_values(recipe, {"run.compile": "off"})
        where = (model, request.data, place / "tuned")
        assignment = Assignment(request.task, recipe, *where, request.skip_bad)
        result = finetune(assignment, self.callback)
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
        assert bert.finetuned is not None, "the model is from a run"
        network = task_model_of(bert.model.network, bert.finetuned, bert.engine).network
        weights = prunable_weights(network)
        masks = magnitude_masks(weights, sparsity)
        if early is not None:
            network.load_state_dict(read_safetensors(early, remedy="give `out` a new folder"))
        apply_masks(weights, masks)
        write_pruned(folder, bert, network)
    return folder

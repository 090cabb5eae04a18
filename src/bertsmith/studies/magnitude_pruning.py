"""Unstructured pruning as stages: gradually while a model is fine-tuned, or after it, with rewinding.

After a training the smallest weights are set to zero, the others are trained again by one or several methods,
and the best model is kept. Several sparsities share the first training. The recipe's section `sparse` defines
the handling of zero weights in each training.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bertsmith.core.files import atomic_path, read_json, write_json
from bertsmith.finetuning.sparse_training import EARLY_WEIGHTS
from bertsmith.inference.loaded_model import load
from bertsmith.model.folder.tensor_files import read_safetensors, write_safetensors
from bertsmith.recipe.finetuning_schema import FinetuningRecipe
from bertsmith.recipe.optim_section import OptimSection
from bertsmith.shrink.slicing import blocks_to_prune
from bertsmith.studies.cells import RUN, Cells, Kind, Result, Stage, Work
from bertsmith.studies.pruning import (
    RESULT,
    Metrics,
    PruningJob,
    copy_model,
    no_operations,
    task_model,
    write_pruned,
)
from bertsmith.studies.scheduler import make_here
from bertsmith.studies.stages import FINETUNE, MODEL, known_model, made_with, task_of
from bertsmith.studies.sweep import with_values
from bertsmith.training.callbacks import ProgressCallback
from bertsmith.training.magnitude import (
    apply_masks,
    cubic_sparsity,
    magnitude_masks,
    prunable_weights,
    published_masks,
    sparsity_of,
)

MASK_FILE, EARLY, SPARSITY = "mask.safetensors", "early", "sparsity"
Retraining = Literal["weights", "rate", "finetune"]
RETRAINING: dict[Retraining, str] = {
    "weights": "weights and schedule are rewound to the rewinding step (Frankle et al. 2020)",
    "rate": "only the schedule is rewound (Renda et al. 2020)",
    "finetune": "nothing is rewound: training at a tenth of the peak rate",
}
FINAL_RATE = 0.1
"""Learning rate of "finetune", as a fraction of the peak.

Published fine-tuning continues at the last rate of the schedule, which is 0 for a linear decay to 0."""


# ---- the stage that sets weights to zero


def run_zeroing(work: Work) -> Result:
    """Write a model with the smallest weights of a trained one at zero; the others may be early weights."""
    began, bert = time.monotonic(), load(work.inputs[MODEL], device="cpu")
    network = task_model(bert).network
    weights = prunable_weights(network)
    masks = magnitude_masks(weights, work.stage.options[SPARSITY])
    if EARLY in work.inputs:
        early = work.inputs[EARLY] / EARLY_WEIGHTS
        network.load_state_dict(read_safetensors(early, remedy="give `out` a new folder"))
    apply_masks(weights, masks)
    write_pruned(work.folder / "model", bert, network)
    metric = task_of(work.stage).deciding_metric
    return Result({}, "", metric, 0, time.monotonic() - began, made_with())


ZERO = Kind("zero", run_zeroing, FINETUNE.parts, FINETUNE.idle, no_operations)


# ---- the job


@dataclass(frozen=True, slots=True)
class Sparsities:
    """The fractions of the layers' weights to set to zero, one model for each, and how to train again.

    The recipe of the job is that of the first training: with sparse.gradual the only one, with
    sparse.early_at the one to rewind to.
    """

    sparsities: tuple[float, ...]
    retraining: tuple[Retraining, ...] = ("weights",)
    rounds: int = 1
    """Number of pruning steps of a trained model, each followed by a training."""

    def places(self, out: Path) -> dict[float, Path]:
        """Return the output folder of each sparsity: `out` itself, or a subfolder for each of several."""
        if len(self.sparsities) == 1:
            return {self.sparsities[0]: out}
        return {sparsity: out / str(sparsity) for sparsity in self.sparsities}


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


def prune_by_magnitude(job: PruningJob, asked: Sparsities, callback: ProgressCallback) -> list[SparseResult]:
    """Prune to each sparsity; a job in the folder resumes, or is reported if it is finished."""
    blocks_to_prune(load(job.model, device="cpu").model.network)
    every = {sparsity: stages_of(job, asked, sparsity) for sparsity in asked.sparsities}
    places = asked.places(job.out)

    def work(cells: Cells) -> None:
        for sparsity, place in places.items():
            if (place / RESULT).is_file():
                continue
            stages = every[sparsity]
            results = make_here(stages, cells, callback)
            trained = {
                name: cells.folder(each) / RUN for name, each in stages.items() if each.kind is FINETUNE
            }
            last = [name for name in trained if name.endswith(f"-{asked.rounds}")] or [*trained]
            kept = best_of({name: results[name] for name in last})
            networks = {name: load(each, device="cpu").model.network for name, each in trained.items()}
            with atomic_path(place / MASK_FILE) as fresh:
                write_safetensors(fresh, published_masks(networks[kept]))
            copy_model(trained[kept], place / "model")
            reports = [
                asdict(SparseReport(name, sparsity_of(network), results[name].metrics))
                for name, network in networks.items()
            ]
            write_json(place / RESULT, {"task": job.task.name, "reports": reports, "kept": kept})
            for stage in [*stages.values()][1:]:  # all sparsities share the first training
                cells.remove_model(stage)
        if len(places) > 1:
            names = [place.name for place in places.values()]
            write_json(job.out / RESULT, {"task": job.task.name, "folders": names})

    job.do_once(asdict(asked), next(iter(every[asked.sparsities[0]].values())), work)
    return [_result_in(place) for place in places.values()]


def _result_in(place: Path) -> SparseResult:
    found = read_json(place / RESULT, remedy="remove the folder and run again")
    return SparseResult(place, tuple(SparseReport(**each) for each in found["reports"]), found["kept"])


def stages_of(job: PruningJob, asked: Sparsities, sparsity: float) -> dict[str, Stage]:
    """Return the stages by name: one training, or for each method and round zeros and a training."""
    # Each of several short runs would be compiled again.
    recipe, given = with_values(job.recipe, {"run.compile": "off"}), known_model(str(job.model))
    first = job.training(recipe, {MODEL: given})
    if recipe.sparse.gradual != "off":
        return {"gradual": first}
    found = {"dense": first}
    for method in asked.retraining:
        trained = first
        for number in range(1, asked.rounds + 1):
            options = {**first.options, SPARSITY: cubic_sparsity(sparsity, number / asked.rounds)}
            inputs = {MODEL: trained, **({EARLY: first} if method == "weights" else {})}
            zeros = replace(first, kind=ZERO, inputs={**first.inputs, **inputs}, options=options)
            found[f"{method}-{number}: zeros"] = zeros
            trained = job.training(recipe_of(recipe, method), {MODEL: zeros})
            found[f"{method}-{number}"] = trained
    return found


def recipe_of(recipe: FinetuningRecipe, method: Retraining) -> FinetuningRecipe:
    """Return the recipe of a training that follows on the first one."""
    begin_at = recipe.sparse.early_at
    changed = {"sparse.early_at": "off", "sparse.keep_zeros": True, "sparse.begin_at": begin_at}
    if method == "finetune":
        rate = FINAL_RATE * recipe.optim.peak_lr
        changed |= {"optim.schedule": "constant", "optim.warmup_fraction": 0.0, "optim.peak_lr": rate}
        changed["optim.decay_from"] = OptimSection().decay_from  # of a schedule that decays
    return with_values(recipe, changed)


def best_of(results: Mapping[str, Result]) -> str:
    """Return the name of the best result on the deciding split, or of the first one without such a split."""
    metric, split = next((each.metric, each.split) for each in results.values())
    if not split:
        return next(iter(results))
    best = max if metric.larger_is_better else min
    return best(results, key=lambda name: results[name].metrics[split][metric.name])

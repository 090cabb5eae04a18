"""Compare cost and quality of several models for one task, in tables and a picture.

Each model is measured in a separate process, one after the other. Measurements are stored next to the table,
so that a stopped call can continue with the next model.
"""

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, sha256_of, write_json
from bertsmith.core.version import VERSION
from bertsmith.core.wording import counted
from bertsmith.finetuning.predict import FURTHER_TASKS, task_config_in
from bertsmith.inference.adapter_folder import base_folder
from bertsmith.inference.model_path import is_adapter, model_folder
from bertsmith.insight.pictures import name_points
from bertsmith.insight.report import Cell, Report, Table, write_report
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.studies.cost_measurement import Cost, CostRequest, runs_in
from bertsmith.tasks.catalogue import task_named
from bertsmith.tasks.metrics import Metric
from bertsmith.tasks.task import Task
from bertsmith.training.curves import GREY, HELD_OUT, TRAINING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED = "measured"
"""Folder of the finished measurements, with a file for each model and device."""
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
MILLI, MEGA, GIGA, PERCENT = 1e3, 1e6, 1e9, 100


@dataclass(frozen=True, slots=True)
class CostTableRequest:
    """Task, models and data of a cost table."""

    task: Task
    models: tuple[Path, ...]
    data: Path
    out: Path
    seconds: float = 3.0
    """Minimum seconds for each timing."""

    def devices(self) -> tuple[str, ...]:
        """Return the devices to measure on: the CPU, and the GPU if there is one."""
        return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


Costs = Mapping[str, Mapping[str, Cost]]
"""Costs by model, as the user named it, and by device."""


def cost_table(request: CostTableRequest, on_message: Callable[[str], None] = lambda _: None) -> Report:
    """Measure all models that are not measured yet; write tables, numbers and picture."""
    metric = _checked_metric(request)
    jobs = [(model, device) for model in request.models for device in request.devices()]
    conditions = _conditions(request)
    costs: dict[str, dict[str, Cost]] = {}
    for number, (model, device) in enumerate(jobs, start=1):
        on_message(f"[{number}/{len(jobs)}] {model} on the {DEVICES[device]}")
        costs.setdefault(str(model), {})[device] = _measured(request, model, device, conditions)
    report = cost_report(request, costs, metric)
    write_report(report, request.out)
    return report


def _checked_metric(request: CostTableRequest) -> Metric:
    """Return the deciding metric; raise before measuring if a model was not fine-tuned for the task."""
    metric = request.task.deciding_metric
    for model in request.models:
        for run in runs_in(model):
            config = task_config_in(run)
            if config is None:
                remedy = "give folders of `bertsmith finetune` runs, or models made from them"
                raise UserError(
                    "was not fine-tuned by bertsmith: it lacks task.json", where=str(run), remedy=remedy
                )
            if config.task != request.task.name:
                remedy = f"give models of one task, or `task={config.task}`"
                raise UserError(f"was fine-tuned for {config.task}", where=str(run), remedy=remedy)
    return metric


# ---- one model on one device


def _measured(request: CostTableRequest, model: Path, device: str, conditions: str) -> Cost:
    file = request.out / MEASURED / f"{_key(model, device, conditions)}.json"
    if file.is_file():
        return _cost(read_json(file, remedy="remove the file to measure again"))
    values = _in_its_own_process(request, model, device)
    cost = _cost(values)
    write_json(file, {"model": str(model), "device": device, **asdict(cost)})
    return cost


def _cost(values: Mapping[str, Any]) -> Cost:
    kept = {key: value for key, value in values.items() if key not in ("model", "device")}
    return Cost(**{**kept, "quality": tuple(kept["quality"])})


def _conditions(request: CostTableRequest) -> str:
    """Describe the common conditions of a call's measurements: settings, machine, content of the data."""
    data = request.data
    content = {str(file.relative_to(data)): sha256_of(file) for file in _data_files(request)}
    machine = {**_machine(), "bertsmith": VERSION, "threads": torch.get_num_threads()}
    return json.dumps([str(data.resolve()), content, request.seconds, machine])


def _data_files(request: CostTableRequest) -> list[Path]:
    """Return the files that the task may read; the folder may also contain others, for example results."""
    if request.data.is_file():
        return [request.data]
    tasks = (request.task, *(task_named(name) for name in FURTHER_TASKS.get(request.task.name, ())))
    patterns = [
        (request.data / name, f"{pattern}*")  # compressed files have one more suffix
        for task in tasks
        for name in ("", *task.folders)
        for split in task.splits.values()
        for pattern in split.files
    ]
    return sorted({file for folder, pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _key(model: Path, device: str, conditions: str) -> str:
    """Return the name of a measurement, from the model's files, the device and the call's conditions."""
    found = hashlib.sha256(f"{device} {conditions}".encode())
    for file in _model_files(model):
        facts = file.stat()
        found.update(f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode())
    return f"{model.resolve().name}-{device}-{found.hexdigest()[:12]}"


def _model_files(model: Path) -> list[Path]:
    """Return the files of all runs in a model's folder; for an adapter, including its base's."""
    folders = [model_folder(run) for run in (*runs_in(model), model)]
    folders += [base_folder(folder) for folder in folders if is_adapter(folder)]
    places = dict.fromkeys(place for folder in folders for place in (folder, transformer_folder(folder)))
    return [file for place in places for file in sorted(place.iterdir()) if file.is_file()]


def _in_its_own_process(request: CostTableRequest, model: Path, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "cost.json"
        asked = CostRequest(model, request.data, device, request.seconds, started=time.monotonic())
        values = json.dumps(asdict(asked), default=str)
        command = [sys.executable, "-m", "bertsmith.studies.cost_measurement", values, str(out)]
        ended = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
        if not out.is_file():
            raise RuntimeError(f"measuring {model} on {device} ended with code {ended.returncode}")
        found = read_json(out, remedy="measure again")
    if "error" in found:
        raise UserError(**found["error"])
    return found


# ---- the table


def cost_report(request: CostTableRequest, costs: Costs, metric: Metric) -> Report:
    """Build the report with the tables of all devices and the picture."""
    tables = []
    for device in request.devices():
        here = {model: each[device] for model, each in costs.items()}
        title = f"{request.task.title}: cost of models on the {DEVICES[device]}"
        tables += [_cost_rows(title, here, metric), _length_rows(here)]
    values = {
        "task": request.task.name,
        "data": str(request.data),
        "machine": _machine(),
        "models": {
            model: {device: asdict(cost) for device, cost in each.items()} for model, each in costs.items()
        },
        "pareto": pareto_front(_points(costs), larger_is_better=metric.larger_is_better),
    }
    return Report("cost", tuple(tables), values, lambda figure: _draw(figure, costs, metric), size=(14, 6))


def _cost_rows(title: str, costs: Mapping[str, Cost], metric: Metric) -> Table:
    columns = (
        *("model", "parameters (M)", "disk (MB)", "GFLOP", "precision", "p50 (ms)", "p95 (ms)", "texts/s"),
        *("start (s)", "peak (MB)", "J/text", metric.name.replace("_", " ")),
    )
    rows: list[list[Cell]] = [
        [
            *(model, f"{cost.parameters / MEGA:.1f}", f"{cost.disk_bytes / MEGA:.1f}"),
            *(f"{cost.flops / GIGA:.2f}", cost.precision),
            *(f"{MILLI * cost.latency_p50:.1f}", f"{MILLI * cost.latency_p95:.1f}"),
            *(f"{cost.throughput:.1f}", f"{cost.startup_seconds:.1f}", f"{cost.peak_bytes / MEGA:.0f}"),
            *(None if cost.joules is None else f"{cost.joules:.3f}", quality_text(cost.quality, metric)),
        ]
        for model, cost in costs.items()
    ]
    threads = counted(next(iter(costs.values())).threads, "thread")
    notes = (
        f"p50, p95: one text of the data, its tokens included; texts/s: 64 at a time; {threads}",
        "GFLOP: all layers, for 128 tokens; start: from nothing to the first scores; peak: memory",
    )
    return Table(title, columns, rows, notes)


def quality_text(values: Sequence[float], metric: Metric) -> str:
    """Format the mean and standard deviation of several runs, or the value of one."""
    mean = metric.text(statistics.fmean(values))
    if len(values) < 2:
        return mean
    return f"{mean} ± {metric.text(statistics.stdev(values))}"


def _length_rows(costs: Mapping[str, Cost]) -> Table:
    lengths = list(dict.fromkeys(length for cost in costs.values() for length in cost.by_length))
    rows: list[list[Cell]] = [
        [model, *(_milliseconds(cost.by_length.get(length)) for length in lengths)]
        for model, cost in costs.items()
    ]
    columns = ("model", *(f"{length} tokens" for length in lengths))
    return Table("Median milliseconds of one text, by its length", columns, rows)


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{MILLI * seconds:.1f}"


def _machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "gpu": gpu, **versions}


# ---- the picture


def _points(costs: Costs) -> dict[str, tuple[float, float]]:
    """Return for each model the latency of one text on the CPU, in milliseconds, and the quality."""
    return {
        model: (MILLI * each["cpu"].latency_p50, statistics.fmean(each["cpu"].quality))
        for model, each in costs.items()
    }


def pareto_front(points: Mapping[str, tuple[float, float]], *, larger_is_better: bool) -> list[str]:
    """Return the models that no other beats in both cost and quality, the cheapest first."""
    sign = 1 if larger_is_better else -1
    front: list[str] = []
    best = float("-inf")
    for model, (_, quality) in sorted(points.items(), key=lambda each: (each[1][0], -sign * each[1][1])):
        if sign * quality > best:
            front.append(model)
            best = sign * quality
    return front


def _draw(figure: "Figure", costs: Costs, metric: Metric) -> None:
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2)
    for model, each in costs.items():
        lengths = [int(length) for length in each["cpu"].by_length]
        times = [MILLI * seconds for seconds in each["cpu"].by_length.values()]
        right.plot(lengths, times, marker="o", ms=3.5, label=model)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.xaxis.set_major_formatter("{x:g}")
    right.yaxis.set_major_formatter("{x:g}")
    right.set_xlabel("tokens of a text")
    right.set_title(
        "Median milliseconds of one text, by its length", loc="left", fontsize=11, weight="bold", pad=8
    )
    right.legend(fontsize=9, frameon=False)
    for axes in (left, right):
        axes.grid(color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_points(left, costs, metric)


def _draw_points(axes: "Axes", costs: Costs, metric: Metric) -> None:
    points = _points(costs)
    front = pareto_front(points, larger_is_better=metric.larger_is_better)
    scale = PERCENT if metric.in_percent else 1
    axes.plot(
        [points[model][0] for model in front], [scale * points[model][1] for model in front], color=GREY, lw=1
    )
    largest = max(each["cpu"].disk_bytes for each in costs.values())
    for model, (milliseconds, quality) in points.items():
        cost = costs[model]["cpu"]
        spread = scale * statistics.stdev(cost.quality) if len(cost.quality) > 1 else 0.0
        colour = HELD_OUT if model in front else TRAINING
        axes.errorbar(milliseconds, scale * quality, yerr=spread or None, color=colour, capsize=3)
        axes.scatter(
            milliseconds, scale * quality, s=30 + 300 * cost.disk_bytes / largest, color=colour, alpha=0.6
        )
    axes.set_xlabel("median milliseconds of one text on the CPU")
    axes.margins(0.15)
    name = metric.name.replace("_", " ")
    axes.set_title(
        f"{name} and its price; areas are sizes on disk", loc="left", fontsize=11, weight="bold", pad=8
    )
    name_points(axes, {model: (time, scale * quality) for model, (time, quality) in points.items()}, size=9)

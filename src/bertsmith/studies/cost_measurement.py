"""Measure the cost of one fine-tuned model on one device, in a separate process that runs this file.

`python -m bertsmith.studies.cost_measurement '{...}' out.json` writes a measurement or a user error.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from bertsmith.core.errors import UserError
from bertsmith.core.files import write_json
from bertsmith.finetuning.predict import Reading, asked_for, predict_labelled
from bertsmith.inference.adapter_folder import ADAPTER_FILES, base_folder
from bertsmith.inference.finetuned_folder import MIX_FILE
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.model_path import SPREAD_FILE, is_adapter, is_model, model_folder
from bertsmith.inference.task_model import TaskModel, task_model_of
from bertsmith.model.encoder_config import PassSize
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.model.folder.tensor_files import WEIGHT_FILES
from bertsmith.model.inference.quantised_weights import QuantisedLayer
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch, pack
from bertsmith.tasks.example_types import Example
from bertsmith.tasks.task import read_split

BATCH_EXAMPLES = 64
TIMED_EXAMPLES = 256
"""Maximum number of different timed examples, so that lengths are the data's."""
LENGTHS = (16, 32, 64, 128, 256, 512)
FLOP_TOKENS = 128
MIN_ROUNDS, MAX_ROUNDS = 5, 2000
FIRST_TOKENS = 16
POWER_COUNTERS = "/sys/class/powercap"
"""Folder of Linux' energy counters of the CPUs, readable only with permission."""


@dataclass(frozen=True, slots=True)
class CostRequest:
    """Model, data and device of a measurement."""

    model: Path
    data: Path
    device: str
    seconds: float
    """Minimum seconds for each timing."""
    started: float
    """Start of the process by the monotonic clock, which all processes of a machine share."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The measured cost and quality of a model."""

    parameters: int
    disk_bytes: int
    flops: float
    """Floating-point operations for one text of 128 tokens, without embeddings and head."""
    precision: str
    threads: int
    startup_seconds: float
    """Seconds from the start of the process to the first scores."""
    latency_p50: float
    latency_p95: float
    """95th percentile of the seconds for one example, including tokenization."""
    throughput: float
    """Examples per second, in batches of 64."""
    joules: float | None
    """Energy per example on a CPU, in batches of 64; None if it cannot be read."""
    peak_bytes: int
    """Peak memory of the process, or of the GPU if the model runs there."""
    by_length: dict[str, float]
    """Median seconds from token ids to the last states for one text, by its number of tokens."""
    metric: str
    quality: tuple[float, ...]
    """Value of the task's deciding metric for each run in the folder."""


def measure(request: CostRequest) -> Cost:
    """Measure the cost of a model; the timings run before anything that fills memory."""
    bert = load(request.model, device=request.device, precision="auto")
    assert bert.finetuned is not None, "the study has checked"
    network = bert.engine.network
    _states(network, _random_batch(FIRST_TOKENS, bert))
    startup = time.monotonic() - request.started
    task_model = task_model_of(network, bert.finetuned, bert.engine)
    examples = _examples(bert, request.data)
    times = _latencies(task_model, examples, request.seconds)
    batch = list(islice(cycle(examples), BATCH_EXAMPLES))
    batches, joules = timed_with_energy(
        lambda _: _predict(task_model, batch), request.seconds, bert.engine.device
    )
    by_length = _by_length(bert, request.seconds)
    peak = _peak_bytes(bert.engine.device)
    metric, quality = _quality(request)
    return Cost(
        parameters=count_parameters(bert.model.network)
        + sum(each.numel() for each in bert.finetuned.mix.values()),
        disk_bytes=_disk_bytes(model_folder(request.model)),
        flops=task_model.scorer.operations(PassSize(FLOP_TOKENS, sequences=1)),
        precision=bert.precision,
        threads=torch.get_num_threads(),
        startup_seconds=startup,
        latency_p50=statistics.median(times),
        latency_p95=_quantile(times, 0.95),
        throughput=BATCH_EXAMPLES / statistics.median(batches),
        joules=None if joules is None else joules / BATCH_EXAMPLES,
        peak_bytes=peak,
        by_length=by_length,
        metric=metric,
        quality=quality,
    )


# ---- time


def timed(work: Callable[[int], object], seconds: float) -> list[float]:
    """Repeat some work for this many seconds after two warm-up rounds; return the seconds of each round."""
    _warm_up(work)
    return _times(work, seconds)


def timed_with_energy(
    work: Callable[[int], object], seconds: float, device: torch.device
) -> tuple[list[float], float | None]:
    """Time work like `timed`, and return the joules of a round too; None on a GPU."""
    _warm_up(work)
    before = joules_used()
    times = _times(work, seconds)
    after = joules_used()
    # Counters restart at 0 when they overflow.
    if device.type != "cpu" or before is None or after is None or after < before:
        return times, None
    return times, (after - before) / len(times)


def _warm_up(work: Callable[[int], object]) -> None:
    for number in range(2):
        work(number)


def _times(work: Callable[[int], object], seconds: float) -> list[float]:
    found: list[float] = []
    while len(found) < MIN_ROUNDS or (sum(found) < seconds and len(found) < MAX_ROUNDS):
        begin = time.perf_counter()
        work(len(found))
        found.append(time.perf_counter() - begin)
    return found


def _latencies(model: TaskModel, examples: Sequence[Example], seconds: float) -> list[float]:
    return timed(lambda number: _predict(model, [examples[number % len(examples)]]), seconds)


def _predict(model: TaskModel, examples: Sequence[Example]) -> None:
    model.predict(examples, model.encode(examples))


def _by_length(bert: Bert, seconds: float) -> dict[str, float]:
    lengths = [length for length in LENGTHS if length <= bert.reader.longest]

    def median(batch: PackedBatch) -> float:
        return statistics.median(timed(lambda _: _states(bert.engine.network, batch), seconds / len(lengths)))

    return {str(length): median(_random_batch(length, bert)) for length in lengths}


def _states(network: Network, batch: PackedBatch) -> None:
    with torch.no_grad():
        network(batch).cpu()  # waits for a GPU


def _random_batch(tokens: int, bert: Bert) -> PackedBatch:
    """Return one random text of this many tokens, always the same."""
    stream = torch.Generator().manual_seed(tokens)
    ids = torch.randint(bert.tokenizer.vocabulary_size, (tokens,), generator=stream).tolist()
    return pack([ids]).to(bert.engine.device)


def _quantile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def joules_used(counters: Path = Path(POWER_COUNTERS)) -> float | None:
    """Return the energy counter of the CPUs in joules; None if it cannot be read."""
    try:
        packages = sorted(counters.glob("intel-rapl:[0-9]*/energy_uj"))
        whole = [file for file in packages if file.parent.name.count(":") == 1]  # others are parts
        return sum(int(file.read_text()) for file in whole) / 1e6 if whole else None
    except (OSError, ValueError):
        return None


# ---- size


def count_parameters(network: Network) -> int:
    """Count all weights of a network, including quantised ones; shared weights count once."""
    quantised = (module for module in network.modules() if isinstance(module, QuantisedLayer))
    return sum(each.numel() for each in network.parameters()) + sum(
        module.weight.numel() for module in quantised
    )


def _disk_bytes(folder: Path) -> int:
    """Return the size of a model's weight files; for an adapter, including its base's."""
    places = {transformer_folder(folder)}
    if is_adapter(folder):
        places = {folder, transformer_folder(base_folder(folder))}
    patterns = (*WEIGHT_FILES, *ADAPTER_FILES, MIX_FILE)
    files = {file for place in places for pattern in patterns for file in place.glob(pattern)}
    return sum(file.stat().st_size for file in files)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- quality


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in the folder of a finished study over several runs; else the folder itself."""
    runs = [each.parent for each in sorted(folder.glob("*/model")) if is_model(each)]
    return runs if runs and (folder / SPREAD_FILE).is_file() else [folder]


def _quality(request: CostRequest) -> tuple[str, tuple[float, ...]]:
    found, name = [], ""
    for run in runs_in(request.model):
        file = predict_labelled([run], request.data, device=request.device, precision="auto")
        name = file.config.deciding_metric.name
        found.append(file.metrics()[name])
    return name, tuple(found)


def _examples(bert: Bert, data: Path) -> Sequence[Example]:
    assert bert.finetuned is not None, "the study has checked"
    task, split = asked_for(bert.finetuned.config, data, Reading())
    return read_split(task, data, split, skip_bad=False).examples[:TIMED_EXAMPLES]


# ---- the process


def request_of(values: Mapping[str, Any]) -> CostRequest:
    """Build a request from its JSON form."""
    request = CostRequest(**values)
    return replace(request, model=Path(request.model), data=Path(request.data))


def main() -> None:
    """Measure as requested on the command line, and write the result."""
    values, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        write_json(out, asdict(measure(request_of(values))))
    except UserError as error:
        write_json(out, {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}})


if __name__ == "__main__":
    main()

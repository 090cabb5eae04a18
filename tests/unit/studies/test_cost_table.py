"""The cost table: what is counted is right, what is measured is kept, and the best are joined by a line."""

import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.inference.loaded_model import load
from bertsmith.model.network import build_network
from bertsmith.studies import cost_measurement
from bertsmith.studies import cost_table as study
from bertsmith.studies.cost_measurement import (
    CostRequest,
    count_parameters,
    joules_used,
    main,
    measure,
    timed,
    timed_with_energy,
)
from bertsmith.studies.cost_table import CostTableRequest, cost_table, pareto_front, quality_text
from bertsmith.tasks.catalogue import task_named
from tests.command_line import bertsmith, mistake
from tests.tiny import tiny_encoder_config
from tests.tokenizer_folders import edit_json
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]
SST2 = task_named("sst2")


@pytest.fixture(scope="module")
def place(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("cost")
    run = tune("sst2", model, place, "head.encoder=lora", *SHORT).folder
    load(run, device="cpu").save(place / "merged")
    return place


@pytest.fixture
def measuring(monkeypatch):
    """Models are measured in this process, and so quickly; the list names those that were."""
    done = []

    def in_this_one(request, model, device):
        done.append((model.name, device))
        cost = measure(CostRequest(model, request.data, device, request.seconds, time.monotonic()))
        return json.loads(json.dumps(study.asdict(cost)))

    monkeypatch.setattr(study, "_in_its_own_process", in_this_one)
    monkeypatch.setattr(CostTableRequest, "devices", lambda _: ("cpu",))
    return done


def test_a_table_of_several_models_is_measured_once(place, tmp_path, capsys, measuring):
    data, out = place / "data" / "sst2", tmp_path / "cost"
    runs = (place / "runs" / "sst2", place / "merged")
    words = ("cost", "--model", *runs, "--task", "sst2", "--data", data, "--out", out, "--seconds", 0)
    told = bertsmith(capsys, *words)
    assert told.code == 0, told.err
    assert [name for name, _ in measuring] == ["sst2", "merged"]
    assert told.out.strip() == (out / "cost.txt").read_text().strip()
    assert "cost of models on the CPU" in told.out and "128 tokens" in told.out
    again = bertsmith(capsys, *words, "--json")
    assert len(measuring) == 2  # what was measured stays
    found = json.loads(again.out)
    assert found == json.loads((out / "cost.json").read_text())
    adapter, merged = (found["models"][str(run)]["cpu"] for run in runs)
    bert = load(place / "merged", device="cpu")
    assert merged["parameters"] == sum(each.numel() for each in bert.model.network.parameters())
    assert merged["disk_bytes"] == (place / "merged" / "model.safetensors").stat().st_size
    assert adapter["disk_bytes"] > merged["disk_bytes"] / 2  # its base counts
    assert adapter["quality"] == merged["quality"] and 0 <= merged["quality"][0] <= 1
    assert merged["latency_p50"] <= merged["latency_p95"] and merged["peak_bytes"] > 1e7
    assert list(merged["by_length"]) == ["16", "32", "64", "128"]  # the toy takes no more
    assert found["pareto"] and set(found["pareto"]) <= set(map(str, runs))


def test_a_model_that_changed_is_measured_again(place, tmp_path, measuring):
    data = place / "data" / "sst2"
    load(place / "merged", device="cpu").save(tmp_path / "copy")
    request = CostTableRequest(SST2, (tmp_path / "copy",), data, tmp_path / "cost", 0.0)
    cost_table(request)
    cost_table(request)
    assert len(measuring) == 1
    load(place / "merged", device="cpu").save(tmp_path / "copy")
    cost_table(request)
    cost_table(replace(request, seconds=0.01))
    assert len(measuring) == 3


@pytest.fixture
def again(place, model, tmp_path, monkeypatch):
    """Measures an adapter, of which all is a copy; whether it was measured, and not found."""
    copied = {name: tmp_path / name for name in ("base", "run", "data")}
    for source, target in zip(
        (model, place / "runs" / "sst2", place / "data" / "sst2"), copied.values(), strict=True
    ):
        shutil.copytree(source, target)
    adapter = next(copied["run"].rglob("adapter_config.json"))
    edit_json(adapter, lambda config: config.update(base_model_name_or_path=str(copied["base"])))
    cost = measure(CostRequest(copied["run"], copied["data"], "cpu", 0.0, time.monotonic()))
    measured = []
    monkeypatch.setattr(study, "_in_its_own_process", lambda *_: measured.append(1) or study.asdict(cost))
    monkeypatch.setattr(CostTableRequest, "devices", lambda _: ("cpu",))
    request = CostTableRequest(SST2, (copied["run"],), copied["data"], tmp_path / "cost", 0.0)

    def measures():
        measured.clear()
        cost_table(request)
        return bool(measured)

    assert measures() and not measures()
    return measures


def test_other_data_are_measured_again(again, tmp_path):
    file = tmp_path / "data" / "dev.tsv"
    facts, text = file.stat(), file.read_text()
    file.write_text(text.swapcase())
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert again()
    file.write_text(text)
    assert not again()


def test_another_base_of_an_adapter_is_measured_again(again, tmp_path):
    os.utime(tmp_path / "base" / "model.safetensors")
    assert again() and not again()


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (study, "VERSION", "next"),
        (torch, "__version__", "next"),
        (torch, "get_num_threads", lambda: 99),
    ],
)
def test_another_machine_or_version_is_measured_again(again, monkeypatch, module, name, value):
    monkeypatch.setattr(module, name, value)
    assert again() and not again()


def test_a_process_of_its_own_measures_the_same(place, tmp_path):
    request = CostTableRequest(SST2, (place / "merged",), place / "data" / "sst2", tmp_path / "cost", 0.0)
    own = study._in_its_own_process(request, place / "merged", "cpu")
    here = measure(CostRequest(place / "merged", request.data, "cpu", 0.0, time.monotonic()))
    same = ("parameters", "disk_bytes", "flops", "metric")
    assert [own[name] for name in same] == [getattr(here, name) for name in same]
    assert tuple(own["quality"]) == here.quality and own["startup_seconds"] > here.startup_seconds


def test_what_the_process_finds_wrong_is_the_users_error(place, tmp_path, monkeypatch):
    def in_this_one(command, **_):
        monkeypatch.setattr(sys, "argv", command[2:])
        main()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(study.subprocess, "run", in_this_one)
    request = CostTableRequest(SST2, (place / "merged",), tmp_path / "nothing", tmp_path / "cost", 0.0)
    with pytest.raises(UserError, match="nothing") as caught:
        cost_table(request)
    assert caught.value.remedy and not (tmp_path / "cost").exists()


def test_models_of_another_task_are_refused_before_anything_is_measured(
    place, model, tmp_path, capsys, measuring
):
    rest = ("--data", place / "data" / "sst2", "--out", tmp_path / "cost")
    one = place / "merged"
    assert "was fine-tuned for sst2" in mistake(capsys, "cost", "--model", one, "--task", "mrpc", *rest)
    told = mistake(capsys, "cost", "--model", one, model, "--task", "sst2", *rest)
    assert "was not fine-tuned by bertsmith" in told
    assert not measuring and not (tmp_path / "cost").exists()


def test_shared_and_quantised_weights_count_once():
    from bertsmith.model.inference.quantised_weights import quantised_table

    network = build_network(tiny_encoder_config("albert"), {})
    before = count_parameters(network)
    assert before == sum(each.numel() for each in network.parameters())
    network.encoder.put_words(quantised_table(network.encoder.words))
    assert count_parameters(network) == before


def test_a_front_has_who_is_beaten_by_none():
    points = {"small": (1.0, 0.8), "slow": (3.0, 0.7), "large": (4.0, 0.9), "same": (4.0, 0.85)}
    assert pareto_front(points, larger_is_better=True) == ["small", "large"]
    assert pareto_front(points, larger_is_better=False) == ["small", "slow"]


def test_quality_has_its_spread_where_there_are_seeds():
    metric = SST2.deciding_metric
    assert quality_text([0.9], metric) == "90.00"
    assert quality_text([0.8, 0.9, 1.0], metric) == "90.00 ± 10.00"


def test_energy_is_told_where_the_machine_tells(tmp_path):
    assert joules_used(tmp_path) is None
    for name, value in (("intel-rapl:0", "2500000"), ("intel-rapl:1", "500000"), ("intel-rapl:0:0", "9")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(value)
    assert joules_used(Path(tmp_path)) == 3.0


@pytest.mark.parametrize(
    ("device", "a_round", "told"),
    [("cpu", 3.0, 3.0), ("cpu", 0.0, 0.0), ("cpu", -3.0, None), ("cuda", 3.0, None)],
)
def test_energy_is_that_of_the_rounds_that_count(monkeypatch, device, a_round, told):
    rounds = []
    monkeypatch.setattr(cost_measurement, "joules_used", lambda: 100 + a_round * len(rounds))
    times, joules = timed_with_energy(rounds.append, 0.0, torch.device(device))
    assert (len(times), joules) == (5, told)
    monkeypatch.setattr(cost_measurement, "joules_used", lambda: None)
    assert timed_with_energy(rounds.append, 0.0, torch.device(device))[1] is None


def test_a_model_takes_the_energy_of_its_counted_batches(place, monkeypatch):
    batches = []
    predict = cost_measurement._predict

    def noted(model, examples):
        if len(examples) > 1:
            batches.append(len(examples))
        predict(model, examples)

    monkeypatch.setattr(cost_measurement, "_predict", noted)
    monkeypatch.setattr(cost_measurement, "joules_used", lambda: float(sum(batches)))
    cost = measure(CostRequest(place / "merged", place / "data" / "sst2", "cpu", 0.0, time.monotonic()))
    assert (len(batches), cost.joules) == (7, 1.0)


def test_the_first_rounds_do_not_count():
    rounds = []
    assert len(timed(rounds.append, 0.0)) == 5
    assert len(rounds) == 7

"""`bertsmith merge`, and adapter folders in the place of model folders."""

import json
import shutil

import pytest
import torch

import bertsmith as package
from bertsmith.inference.loaded_model import load
from tests.command_line import bertsmith, mistake
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("lora"), "head.encoder=lora", *SHORT).folder


def test_an_adapter_becomes_a_folder_that_needs_its_base_no_more(run, tmp_path, capsys):
    told = bertsmith(capsys, "merge", "--model", run, "--out", tmp_path / "merged")
    assert (told.code, told.out) == (0, f"{run} -> {tmp_path / 'merged'}\n")
    merged, adapter = (
        load(each, device="cpu").classify(["warm tea"])[0] for each in (tmp_path / "merged", run)
    )
    assert merged == adapter
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert "already exists" in mistake(capsys, "merge", "--model", run, "--out", tmp_path / "merged")
    told = mistake(capsys, "merge", "--model", tmp_path / "merged", "--out", tmp_path / "again")
    assert "is not an adapter folder; give a folder with adapter_config.json" in told


@pytest.fixture(scope="module")
def moved(run, tmp_path_factory):
    """The same adapter on a machine that has its base elsewhere."""
    folder = tmp_path_factory.mktemp("moved") / "adapter"
    shutil.copytree(run / "model", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "/nowhere/base"})
    )
    return folder


def test_commands_take_an_adapter_folder_and_another_place_of_its_base(run, moved, model, capsys):
    as_found = bertsmith(capsys, "classify", "warm tea", "--model", run, "--json", "--precision", "fp32").out
    told = mistake(capsys, "classify", "warm tea", "--model", moved)
    assert "its base model '/nowhere/base' is not on this machine" in told and "--base FOLDER" in told
    given = ("--model", moved, "--base", model, "--json", "--precision", "fp32")
    assert bertsmith(capsys, "classify", "warm tea", *given).out == as_found


def test_files_are_evaluated_and_predicted_over_another_place_of_the_base(
    run, moved, model, tmp_path, capsys
):
    data, base = tmp_path / "new.tsv", ("--base", model, "--precision", "fp32")
    data.write_text("sentence\tlabel\nwarm tea\t1\ncold rain\t0\n")
    assert "--base FOLDER" in mistake(capsys, "evaluate", "--model", moved, "--data", data)
    told = bertsmith(capsys, "evaluate", "--model", moved, "--data", data, *base, "--json")
    assert told.code == 0
    scored = package.evaluate(moved, data, base=model, device="cpu", precision="fp32")
    assert scored.metrics == json.loads(told.out)["measures"]
    for folder, options in ((run, base[2:]), (moved, base)):
        place = tmp_path / f"{folder.name}.tsv"
        assert (
            bertsmith(capsys, "predict", "--model", folder, "--input", data, "--out", place, *options).code
            == 0
        )
    assert (tmp_path / f"{run.name}.tsv").read_bytes() == (tmp_path / "adapter.tsv").read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_base_with_other_weights_is_refused_in_one_line(moved, model, tmp_path, capsys, precision):
    other = load(model, device="cpu")
    with torch.no_grad():
        other.model.network.encoder.blocks[0].feed_forward.expand.weight.mul_(1.1)
    other.save(tmp_path / "other")
    given = ("--model", moved, "--precision", precision)
    told = mistake(capsys, "classify", "warm tea", *given, "--base", tmp_path / "other")
    assert "the adapter was trained over another base: the weights differ" in told
    assert "with --base" in told and told.count("\n") <= 1
    assert bertsmith(capsys, "classify", "warm tea", *given, "--base", model).code == 0

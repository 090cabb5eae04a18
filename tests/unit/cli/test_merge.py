"""`bertsmith merge`, and adapter folders in the place of model folders."""

import json

import pytest

from bertsmith.inference.loaded_model import load
from tests.command_line import bertsmith, mistake
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("lora"), "head.encoder=lora", *SHORT).folder


def test_an_adapter_becomes_a_folder_that_needs_its_base_no_more(run, tmp_path, capsys):
    told = bertsmith(capsys, "merge", run, "--out", tmp_path / "merged")
    assert (told.code, told.out) == (0, f"{run} -> {tmp_path / 'merged'}\n")
    merged, adapter = (
        load(each, device="cpu").classify(["warm tea"])[0] for each in (tmp_path / "merged", run)
    )
    assert merged == adapter
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert "is there already" in mistake(capsys, "merge", run, "--out", tmp_path / "merged")
    told = mistake(capsys, "merge", tmp_path / "merged", "--out", tmp_path / "again")
    assert "is no adapter folder; give a folder with adapter_config.json" in told


def test_commands_take_an_adapter_folder_and_another_place_of_its_base(run, model, tmp_path, capsys):
    as_found = bertsmith(capsys, "classify", "warm tea", "--model", run, "--json", "--precision", "fp32").out
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (run / "model").iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    config["base_model_name_or_path"] = "/nowhere/base"
    (moved / "adapter_config.json").write_text(json.dumps(config))
    told = mistake(capsys, "classify", "warm tea", "--model", moved)
    assert "its base model '/nowhere/base' is not on this machine" in told and "--base FOLDER" in told
    given = ("--model", moved, "--base", model, "--json", "--precision", "fp32")
    assert bertsmith(capsys, "classify", "warm tea", *given).out == as_found

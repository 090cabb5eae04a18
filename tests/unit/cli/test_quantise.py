"""`bertsmith quantise`: folders that open everywhere, without being calibrated again, and cannot learn."""

import json

import pytest

from bertsmith.inference.loaded_model import load
from tests.command_line import bertsmith, mistake
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("warm tea in the morning\n\ncold rain outside\tthe boy runs\n" * 20)
    return file


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("run"), "head.encoder=lora", *SHORT).folder


@pytest.fixture
def no_calibration(monkeypatch):
    def stop(*_):
        raise AssertionError("it was calibrated before")

    monkeypatch.setattr("bertsmith.inference.precision.calibrated", stop)


def test_a_run_with_an_adapter_becomes_a_small_folder_that_opens_everywhere(
    run, texts, tmp_path, capsys, no_calibration
):
    data, out = tmp_path / "new.tsv", tmp_path / "int8"
    data.write_text("sentence\tlabel\nwarm tea\t1\ncold rain\t0\n")
    told = bertsmith(
        capsys, "quantise", "--model", run, "--calibrate", texts, "--data", data, "--out", out, "--json"
    )
    facts = json.loads(told.out)
    assert facts["texts"] == 40 and facts["bytes_after"] < facts["bytes_before"] / 2
    assert facts["before"].keys() == facts["after"].keys() == {"accuracy"}
    rounded = ("--weights-only", "--data", data, "--out", tmp_path / "rounded")
    told = bertsmith(capsys, "quantise", "--model", run, *rounded)
    assert f"  accuracy: {100 * facts['before']['accuracy']:.2f} -> " in told.out  # percent, as everywhere
    plain = load(run, device="cpu").classify(["warm tea"])[0].probabilities["positive"]
    for precision in ("auto", "int8", "fp32", "bf16"):
        words = ("classify", "warm tea", "--model", out, "--json", "--precision", precision)
        found = json.loads(bertsmith(capsys, *words).out)
        assert found["probabilities"]["positive"] == pytest.approx(plain, abs=0.02)
    assert bertsmith(capsys, "evaluate", "--model", out, "--data", data).code == 0
    load(out, device="cpu").save(tmp_path / "again")
    weights = [(each / "model.safetensors").read_bytes() for each in (out, tmp_path / "again")]
    assert weights[0] == weights[1]


def test_what_a_feature_based_folder_keeps_unrounded_counts(model, texts, tmp_path, capsys):
    run = tune("sst2", model, tmp_path / "run", *SHORT, "head.encoder=frozen-features").folder
    out = tmp_path / "int8"
    told = bertsmith(capsys, "quantise", "--model", run, "--calibrate", texts, "--out", out, "--json")
    facts, mix = json.loads(told.out), (out / "mix.safetensors").stat().st_size
    assert facts["bytes_after"] == mix + (out / "model.safetensors").stat().st_size
    weights = sum(each.nbytes for each in load(run, device="cpu").model.network.parameters())
    assert facts["bytes_before"] == mix + weights


def test_data_that_cannot_be_read_leaves_nothing_written(capsys, run, texts, tmp_path):
    data, out = tmp_path / "new.tsv", tmp_path / "int8"
    data.write_text("text\tlabel\nwarm tea\t1\n")
    said = mistake(capsys, "quantise", "--model", run, "--calibrate", texts, "--data", data, "--out", out)
    assert "lacks the column 'sentence'" in said and not out.exists()


def test_eight_bit_products_are_taken_where_the_machine_has_them(
    model, texts, tmp_path, capsys, monkeypatch, no_calibration
):
    out = tmp_path / "int8"
    assert bertsmith(capsys, "quantise", "--model", model, "--calibrate", texts, "--out", out).code == 0
    monkeypatch.setattr("bertsmith.inference.precision.has_int8_products", lambda: True)
    text = "the [MASK] is warm ."
    found = load(out, device="cpu", precision="auto").fill(text)
    assert found == load(out, device="cpu", precision="int8").fill(text)
    assert found != load(out, device="cpu").fill(text)
    monkeypatch.setattr("bertsmith.inference.precision.has_int8_products", lambda: False)
    assert load(out, device="cpu", precision="auto").fill(text) == load(out, device="cpu").fill(text)


def test_weights_alone_need_no_texts(model, tmp_path, capsys):
    sizes = {}
    for bits in (8, 4):
        out = tmp_path / str(bits)
        told = bertsmith(capsys, "quantise", "--model", model, "--weights-only", "--bits", bits, "--out", out)
        assert told.code == 0 and f"{bits} bits, weights only" in told.out
        sizes[bits] = (out / "model.safetensors").stat().st_size
        assert load(out, device="cpu").fill("the [MASK] is warm .")
    assert sizes[4] < sizes[8]


def test_each_mistake_is_one_line_and_nothing_is_written(model, run, texts, tmp_path, capsys):
    given = ("quantise", "--model", model, "--out", tmp_path / "out")
    assert "--calibrate FILE" in mistake(capsys, *given)
    assert "--weights-only" in mistake(capsys, *given, "--bits", 4)
    assert "choose 8 or 4" in mistake(capsys, *given, "--bits", 3, "--weights-only")
    assert "remove one of the two" in mistake(capsys, *given, "--weights-only", "--calibrate", texts)
    (tmp_path / "pairs.csv").write_text("one,two\nwarm tea,cold rain\n")
    assert "--text COLUMN" in mistake(capsys, *given, "--calibrate", tmp_path / "pairs.csv")
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "does not contain a text" in mistake(capsys, *given, "--calibrate", tmp_path / "empty.txt")
    assert not (tmp_path / "out").exists()
    columns = ("--text", "one", "--text2", "two")
    assert bertsmith(capsys, *given, "--calibrate", tmp_path / "pairs.csv", *columns).code == 0
    again = ("quantise", "--model", tmp_path / "out", "--weights-only", "--out", tmp_path / "twice")
    assert "is already quantised; use the model that it was made from" in mistake(capsys, *again)
    assert "already exists" in mistake(capsys, *given, "--calibrate", texts)
    base = ("classify", "warm tea", "--model", run, "--base", tmp_path / "out")
    assert "quantised weights do not support adapters" in mistake(capsys, *base)
    learn = ("finetune", "sst2", "--model", tmp_path / "out", "--data", run.parent.parent / "data" / "sst2")
    assert "quantised, so it cannot learn" in mistake(capsys, *learn, "--out", tmp_path / "run")

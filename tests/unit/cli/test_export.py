"""`bertsmith export`: folders for onnxruntime, of every kind of folder that bertsmith opens."""

import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from transformers import AutoConfig, AutoTokenizer

from bertsmith.inference.loaded_model import load
from bertsmith.interchange import onnx_export
from tests.command_line import bertsmith, mistake
from tests.tuning import SHORT, quickly, toy_model, tune

__all__ = ["quickly", "toy_model"]
TEXTS = ["warm tea in the morning", "cold rain", "the cat sleeps under the tree"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    return tune("sst2", model, tmp_path_factory.mktemp("run"), "head.encoder=lora", *SHORT).folder


def outputs_of(folder) -> dict[str, np.ndarray]:
    """What a tool that knows nothing of bertsmith gets for the texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    opened = onnxruntime.InferenceSession(folder / "model.onnx")
    fed = tokenizer(TEXTS, padding=True, return_tensors="np")
    names = [each.name for each in opened.get_outputs()]
    inputs = {each.name: fed[each.name].astype(np.int64) for each in opened.get_inputs()}
    return dict(zip(names, opened.run(None, inputs), strict=True))


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_a_run_with_an_adapter_gives_its_probabilities_in_onnxruntime(run, tmp_path, capsys):
    out = tmp_path / "onnx"
    told = bertsmith(capsys, "export", "--model", run, "--onnx", out)
    assert (told.code, "opset 17, fp32" in told.out) == (0, True)
    config = AutoConfig.from_pretrained(out)
    found = probabilities(outputs_of(out)["logits"])
    for row, ours in zip(found, load(run, device="cpu").classify(TEXTS), strict=True):
        theirs = {config.id2label[number]: value for number, value in enumerate(row.tolist())}
        assert theirs == pytest.approx(ours.probabilities, abs=1e-4)
    told = bertsmith(
        capsys, "export", "--model", run, "--precision", "fp16", "--onnx", tmp_path / "h", "--json"
    )
    facts = json.loads(told.out)
    assert facts["precision"] == "fp16" and facts["outputs"] == ["logits"]
    assert np.abs(probabilities(outputs_of(tmp_path / "h")["logits"]) - found).max() < 0.01
    sizes = [(each / "model.onnx").stat().st_size for each in (out, tmp_path / "h")]
    assert sizes[1] < 0.7 * sizes[0]


def test_heads_are_read_as_they_were_trained(model, tmp_path, capsys):
    run = tune("sst2", model, tmp_path, "head.cls=raw", "head.pooling=mean", *SHORT).folder
    told = bertsmith(capsys, "export", "--model", run, "--onnx", tmp_path / "onnx")
    assert "the head reads the last state" in told.out
    found = probabilities(outputs_of(tmp_path / "onnx")["logits"])
    ours = [list(each.probabilities.values()) for each in load(run, device="cpu").classify(TEXTS)]
    np.testing.assert_allclose(found, ours, atol=1e-4)


def test_a_quantised_folder_is_exported_in_eight_bits(model, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    int8, out = tmp_path / "int8", tmp_path / "onnx"
    bertsmith(capsys, "quantise", "--model", model, "--calibrate", tmp_path / "texts.txt", "--out", int8)
    assert "int8" in bertsmith(capsys, "export", "--model", int8, "--onnx", out).out
    assert bertsmith(capsys, "export", "--model", model, "--onnx", tmp_path / "fp32").code == 0
    found, exact = (outputs_of(each)["logits"] for each in (out, tmp_path / "fp32"))
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.99
    assert (out / "model.onnx").stat().st_size < 0.6 * (tmp_path / "fp32" / "model.onnx").stat().st_size
    assert AutoConfig.from_pretrained(out).model_type == "bert"
    again = ("export", "--model", int8, "--onnx", tmp_path / "no")
    assert "is quantised, and fp16 would be no more exact" in mistake(capsys, *again, "--precision", "fp16")
    few = ("quantise", "--model", model, "--weights-only", "--bits", 4, "--out", tmp_path / "int4")
    assert bertsmith(capsys, *few).code == 0
    four = ("export", "--model", tmp_path / "int4", "--onnx", tmp_path / "no")
    assert "int4: has weights of 4 bits" in mistake(capsys, *four)
    assert not (tmp_path / "no").exists()


def test_the_file_alone_and_weights_too_large_for_one(model, tmp_path, capsys, monkeypatch):
    assert bertsmith(capsys, "export", "--model", model, "--onnx", tmp_path / "my.onnx").code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["my.onnx"]
    onnx.checker.check_model(onnx.load(tmp_path / "my.onnx"), full_check=True)
    assert "already exists" in mistake(capsys, "export", "--model", model, "--onnx", tmp_path / "my.onnx")
    bertsmith(capsys, "export", "--model", model, "--onnx", tmp_path / "whole")
    monkeypatch.setattr(onnx_export, "MAX_BYTES", 1000)
    assert "give a folder" in mistake(capsys, "export", "--model", model, "--onnx", tmp_path / "large.onnx")
    assert bertsmith(capsys, "export", "--model", model, "--onnx", tmp_path / "large").code == 0
    assert (tmp_path / "large" / "model.onnx_data").stat().st_size > 100_000
    one, two = (outputs_of(tmp_path / name)["logits"] for name in ("whole", "large"))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("setting", ["head.cls=raw", "head.pooling=mean"])
def test_a_head_that_transformers_reads_otherwise_is_not_exported_there(setting, model, tmp_path, capsys):
    run = tune("sst2", model, tmp_path, setting, *SHORT).folder
    told = mistake(capsys, "export", "--model", run, "--transformers", tmp_path / "out")
    assert f"trained with {setting}" in told
    assert not (tmp_path / "out").exists()


def test_each_mistake_is_one_line_and_nothing_is_written(model, tmp_path, capsys, monkeypatch):
    given = ("export", "--model", model, "--onnx", tmp_path / "out")
    assert "choose one of fp32, fp16, int8" in mistake(capsys, *given, "--precision", "int4")
    assert "bertsmith quantise" in mistake(capsys, *given, "--precision", "int8")
    features = tune(
        "sst2", model, tmp_path, "head.encoder=frozen-features", "features.width=8", *SHORT
    ).folder
    for option in ("--onnx", "--transformers"):
        told = mistake(capsys, "export", "--model", features, option, tmp_path / "out")
        assert "has a BiLSTM over the" in told
    monkeypatch.delitem(sys.modules, "bertsmith.interchange.onnx_graph")
    monkeypatch.delitem(sys.modules, "bertsmith.interchange.onnx_network")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "exporting needs onnx; pip install 'bertsmith[onnx]'" in mistake(capsys, *given)
    assert not (tmp_path / "out").exists()

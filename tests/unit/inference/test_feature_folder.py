"""Folders of features: what transformers computes, to be opened as arrays, and resumed after a stop."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.core.arrays import GrowingNpy
from bertsmith.core.errors import UserError
from bertsmith.inference import feature_folder
from bertsmith.inference.feature_folder import FeatureRequest, FeatureSpec, open_features, writing_features

TEXTS = ["The cat sits on the mat.", "A dog", "my cute apple: was it in Paris?"]
COMBINED = {
    "concat": lambda states: torch.cat(states, -1),
    "mean": lambda states: torch.stack(states).mean(0),
    "separate": lambda states: torch.stack(states, 1),
}


@pytest.mark.parametrize(
    ("layers", "combine", "numbers"),
    [("last4", "concat", [1, 2]), ("embeddings", "mean", [0]), ("all-and-embeddings", "separate", [0, 1, 2])],
)
def test_features_are_those_of_transformers(folder, tmp_path, layers, combine, numbers):
    found = bertsmith.extract_features(
        TEXTS, out=tmp_path / "features", model=folder, layers=layers, combine=combine
    )
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = bertsmith.load(folder).tokenizer
    assert len(found) == len(TEXTS) and found.facts["layer_numbers"] == numbers
    for number, text in enumerate(TEXTS):
        encoded = tokenizer.encode(text)
        with torch.no_grad():
            states = model(torch.tensor([encoded.ids]), output_hidden_states=True).hidden_states
        expected = COMBINED[combine]([states[layer][0] for layer in numbers])
        assert np.abs(found.of_text(number) - expected.numpy()).max() < 1e-5
        rows = slice(*found.starts[number : number + 2])
        assert found.tokens[rows].tolist() == encoded.ids
        offsets = found.offsets[rows].tolist()
        assert offsets[0] == offsets[-1] == [-1, -1]
        assert [text[start:end].lower() for start, end in offsets[1:3]] == [
            tokenizer.token(id).removeprefix("##") for id in encoded.ids[1:3]
        ]
    assert found.lines.tolist() == [1, 2, 3] and isinstance(found.vectors, np.memmap)


def test_a_stopped_call_resumes_to_the_same_arrays(bert, tmp_path, monkeypatch):
    whole = FeatureRequest(FeatureSpec(), tmp_path / "whole", "hash")
    with writing_features(bert, whole) as writer:
        for line, text in enumerate(TEXTS, 1):
            writer.append([text], [line])
    stopped = FeatureRequest(FeatureSpec(), tmp_path / "stopped", "hash")
    with pytest.raises(KeyboardInterrupt), writing_features(bert, stopped) as writer:
        for line, text in enumerate(TEXTS[:2], 1):
            writer.append([text], [line])
        writer.arrays["vectors"].append(np.zeros((1, 128)))  # half of a piece
        raise KeyboardInterrupt
    assert not stopped.out.exists()
    (stopped.unfinished / ".features.json.01234567.partial").touch()  # as a kill would leave it
    seen = []
    encode = bert.reader.encode
    monkeypatch.setattr(
        bert.reader, "encode", lambda texts, **given: seen.extend(texts) or encode(texts, **given)
    )
    with writing_features(bert, stopped) as writer:
        for line, text in enumerate(TEXTS, 1):
            writer.append([text], [line])
    assert seen == TEXTS[2:]
    names = sorted(file.name for file in whole.out.iterdir())
    assert names == sorted(file.name for file in stopped.out.iterdir())
    for name in names:
        assert (whole.out / name).read_bytes() == (stopped.out / name).read_bytes(), name


@pytest.mark.parametrize("other", [{"source": "another"}, {"source": ""}, {"spec": FeatureSpec("last")}])
def test_what_another_call_left_is_not_continued(bert, tmp_path, other):
    request = {"spec": FeatureSpec(), "source": "hash", "out": tmp_path / "features"}
    with pytest.raises(KeyboardInterrupt), writing_features(bert, FeatureRequest(**request)) as writer:
        writer.append(TEXTS[:1], [1])
        raise KeyboardInterrupt
    with writing_features(bert, FeatureRequest(**(request | other))) as writer:
        writer.append(TEXTS[1:2], [1])
    found = open_features(tmp_path / "features")
    assert found.tokens.tolist() == bert.tokenizer.encode(TEXTS[1]).ids


def test_a_text_that_cannot_be_read_leaves_nothing(bert, tmp_path):
    with pytest.raises(UserError, match="is empty") as caught:
        bertsmith.extract_features(["a", " "], out=tmp_path / "features", model=bert)
    assert caught.value.index == 1 and list(tmp_path.iterdir()) == []


def test_two_processes_do_not_write_one_folder(bert, tmp_path, monkeypatch):
    request = FeatureRequest(FeatureSpec(), tmp_path / "features", "hash")

    def held_by_another(_):
        raise BlockingIOError

    with monkeypatch.context() as patch, pytest.raises(UserError, match="another process"):
        patch.setattr(feature_folder, "lock_for_this_process", held_by_another)
        with writing_features(bert, request):
            pass
    with writing_features(bert, request) as writer:
        writer.append(TEXTS[:1], [1])
    with pytest.raises(UserError, match="already exists"), writing_features(bert, request):
        pass


def test_unknown_choices_and_damaged_folders_are_one_line(bert, tmp_path):
    with pytest.raises(UserError, match="unknown layers 'first'.*last4"):
        bertsmith.extract_features(TEXTS, out=tmp_path / "x", model=bert, layers="first")
    found = bertsmith.extract_features(TEXTS, out=tmp_path / "features", model=bert)
    assert len(found) == 3
    file, facts = (tmp_path / "features" / name for name in ("tokens.npy", "features.json"))
    whole = file.read_bytes()
    for damaged in (b"", whole.replace(b"}", b"("), whole.replace(b"'shape': (", b"'shape': [")):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="tokens.npy: is not a whole .npy file"):
            open_features(tmp_path / "features")
    np.save(file, np.int32(1))
    with pytest.raises(UserError, match="its arrays do not fit together"):
        open_features(tmp_path / "features")
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"format": 2}))
    with pytest.raises(UserError, match="has format 2, not 1"):
        open_features(tmp_path / "features")


@pytest.mark.parametrize("fault", ["array", "rename"])
def test_features_report_a_fault_of_the_disk(tmp_path: Path, bert, monkeypatch, fault) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    request = FeatureRequest(FeatureSpec(), tmp_path / "features", source="x")
    if fault == "array":
        monkeypatch.setattr(GrowingNpy, "flush", full)
    else:
        monkeypatch.setattr(Path, "rename", full)
    with (
        pytest.raises(UserError, match="features: cannot be written .No space left"),
        writing_features(bert, request) as writer,
    ):
        writer.append(["A text."], [1])
    assert not (tmp_path / "features").exists()

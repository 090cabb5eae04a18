"""The commands as a person runs them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

import bertsmith
from bertsmith.model.network import new_network, published_names
from tests.bundle_writer import write_bundle
from tests.command_line import bertsmith as bertsmith_here
from tests.tiny import tiny_config, tiny_encoder_config
from tests.toy_folder import toy_vocabulary


def bertsmith_command(*words):
    """A command in a process of its own, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "bertsmith", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def checkpoint(tmp_path):
    """A TensorFlow 1 checkpoint of a tiny BERT with its pre-training heads, and the network behind it."""
    vocabulary = toy_vocabulary()
    encoder_config = tiny_encoder_config(vocabulary=len(vocabulary))
    network = new_network(encoder_config, {"pooler": 0, "mlm": 0, "nsp": 2}, torch.Generator().manual_seed(5))
    source = tmp_path / "uncased_tiny"
    source.mkdir()
    config = {key: value for key, value in tiny_config("bert").items() if key != "model_type"}
    config |= {"vocab_size": len(vocabulary), "hidden_act": "gelu", "type_vocab_size": 2}
    (source / "bert_config.json").write_text(json.dumps(config))
    (source / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    write_bundle(source / "bert_model.ckpt", variables(network))
    return source, network


def variables(network) -> dict[str, np.ndarray]:
    """The network's weights under their TensorFlow names."""
    held = {}
    state = network.state_dict()
    for ours, theirs in published_names(network.config, {"pooler": 0, "mlm": 0, "nsp": 2}).items():
        for name, part in zip(theirs, state[ours].chunk(len(theirs)), strict=True):
            held[tensorflow_name(name)] = tensorflow_layout(name, part.numpy())
    return held | {"global_step": np.array(9, dtype=np.int64)}


def tensorflow_name(name: str) -> str:
    name = name.replace("encoder.layer.", "encoder.layer_").replace("LayerNorm.weight", "LayerNorm.gamma")
    name = name.replace("LayerNorm.bias", "LayerNorm.beta").replace(
        "predictions.bias", "predictions.output_bias"
    )
    name = name.replace("seq_relationship.weight", "seq_relationship.output_weights")
    name = name.replace("seq_relationship.bias", "seq_relationship.output_bias")
    if "embeddings" in name and name.endswith("embeddings.weight"):
        name = name.removesuffix(".weight")
    return name.replace(".weight", ".kernel").replace(".", "/")


def tensorflow_layout(name: str, array: np.ndarray) -> np.ndarray:
    stays = "embeddings" in name or "seq_relationship" in name
    return array if array.ndim < 2 or stays else np.ascontiguousarray(array.T)


def test_a_tensorflow_checkpoint_becomes_a_model_folder_with_the_same_weights(checkpoint, tmp_path):
    source, network = checkpoint
    done = bertsmith_command("import-tf", source, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["architecture"] == "BertForPreTraining" and report["skipped"] == ["global_step"]
    assert report["unknown"] == []
    bert = bertsmith.load(tmp_path / "out")
    again = bert.model.network.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in network.state_dict().items())
    assert len(bert.fill("The [MASK] sits.", top=3)[0]) == 3
    transformers.BertForPreTraining.from_pretrained(tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("the dog")["input_ids"][0] == 2


def test_the_import_tells_a_person_what_it_wrote(checkpoint, capsys, tmp_path):
    source, _ = checkpoint
    done = bertsmith_here(capsys, "import-tf", source, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "BertForPreTraining" in done.out and "global_step" in done.out


def test_an_import_never_writes_into_a_folder_that_holds_something(checkpoint, capsys, tmp_path):
    source, _ = checkpoint
    done = bertsmith_here(capsys, "import-tf", source, "--out", source)
    assert done.code == 2 and "already exists; name a new folder" in done.err


def test_a_corrupted_checkpoint_is_rejected_by_its_checksum_and_writes_nothing(checkpoint, capsys, tmp_path):
    source, _ = checkpoint
    data = source / "bert_model.ckpt.data-00000-of-00001"
    held = bytearray(data.read_bytes())
    held[len(held) // 2] ^= 1
    data.write_bytes(held)
    done = bertsmith_here(capsys, "import-tf", source, "--out", tmp_path / "out")
    assert done.code == 2
    assert "checksum" in done.err and len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_layer_that_is_missing_is_named(checkpoint, capsys, tmp_path):
    source, _ = checkpoint
    config = json.loads((source / "bert_config.json").read_text()) | {"num_hidden_layers": 5}
    (source / "bert_config.json").write_text(json.dumps(config))
    done = bertsmith_here(capsys, "import-tf", source, "--out", tmp_path / "out")
    assert done.code == 2 and "bert.encoder.layer.3" in done.err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_checkpoint_is_rejected_in_one_line(capsys, tmp_path):
    done = bertsmith_here(capsys, "import-tf", tmp_path, "--out", tmp_path / "out")
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1

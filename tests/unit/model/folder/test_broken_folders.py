"""What cannot be read says so in one line."""

import json
import os
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.model.folder.model_folder import Model, read_model, write_model
from tests.folders import change_config, complaint, drop
from tests.tiny import tiny_network


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path, Model(tiny_network()))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "unknown model_type 'llama'; bertsmith supports bert"),
        ({"model_type": "DROP"}, "lacks a model_type; add"),
        ({"hidden_size": "DROP"}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"hidden_size": -3}, "hidden_size is -3"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"num_attention_heads": 5}, "5 attention heads do not divide a width of 32"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"layer_norm_eps": 10**400}, "layer_norm_eps is 1000"),
        ({"layer_norm_eps": "tiny"}, "layer_norm_eps is 'tiny'"),
        ({"hidden_dropout_prob": -0.1}, "hidden_dropout_prob is -0.1"),
        ({"attention_probs_dropout_prob": 1.5}, "attention_probs_dropout_prob is 1.5; a rate from 0 to 1"),
        ({"hidden_act": "swishy"}, "hidden_act is 'swishy'; supported: gelu"),
        ({"position_embedding_type": "relative_key"}, "only 'absolute' is supported"),
        ({"is_decoder": "yes"}, "is_decoder is 'yes'; true or false is expected"),
        ({"tie_word_embeddings": False}, "weights are missing: cls.predictions.decoder.weight"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"architectures": "Bert"}, "architectures is 'Bert'; a list of words is expected"),
        ({"vocab_size": 100}, "is [99, 32], but config.json requires [100, 32]"),
        (
            {"num_hidden_layers": 4},
            "weights are missing: bert.encoder.layer.3.attention.output.LayerNorm.bias",
        ),
    ],
    ids=str,
)
def test_a_wrong_config_is_rejected_by_its_key(folder, changes, said):
    change_config(folder, **changes)
    assert said in complaint(folder)


def test_modernbert_settings_that_make_another_model_are_rejected(tmp_path):
    write_model(tmp_path, Model(tiny_network("modernbert", heads={"mlm": 0})))
    good = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, layer_types=["full_attention", "linear_attention", "full_attention"])
    assert "layer_types" in complaint(tmp_path)
    change_config(tmp_path, **good | {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}})
    assert "rope_parameters.full_attention: rope_type is 'yarn'; only 'default' is supported" in complaint(
        tmp_path
    )
    change_config(tmp_path, **good | {"rope_parameters": {"rope_type": "yarn", "factor": 4}})
    assert "rope_parameters has 'rope_type'" in complaint(tmp_path)
    change_config(tmp_path, **good | {"rope_scaling": {"rope_type": "yarn"}})
    assert "rope_scaling" in complaint(tmp_path)
    change_config(tmp_path, **good | {"rope_scaling": None, "rope_parameters": 3})
    assert "rope_parameters is 3; an object is expected" in complaint(tmp_path)
    change_config(tmp_path, **good | {"norm_bias": "no"})
    assert "norm_bias is 'no'; true or false is expected" in complaint(tmp_path)


def test_a_modernbert_config_of_2024_means_the_same(tmp_path):
    network = tiny_network("modernbert", heads={"mlm": 0})
    write_model(tmp_path, Model(network))
    change_config(
        tmp_path,
        rope_parameters="DROP",
        layer_types="DROP",
        global_rope_theta=160000.0,
        local_rope_theta=10000.0,
        global_attn_every_n_layers=3,
    )
    assert read_model(tmp_path).network.config == network.config


def test_a_folder_that_is_none_is_rejected(tmp_path):
    assert "is not a folder" in complaint(tmp_path / "nowhere")
    assert "config.json: cannot be read" in complaint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "is not a JSON object" in complaint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "is not valid JSON" in complaint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in complaint(tmp_path)


def test_a_folder_without_weights_is_rejected(folder):
    (folder / "model.safetensors").unlink()
    assert "does not contain weights" in complaint(folder)


def test_missing_weights_are_listed_by_name(folder):
    drop(folder, "bert.encoder.layer.1.output.dense.bias", "bert.embeddings.word_embeddings.weight")
    line = complaint(folder)
    assert "bert.embeddings.word_embeddings.weight, bert.encoder.layer.1.output.dense.bias" in line


def test_a_head_that_the_architecture_promises_must_be_whole(folder):
    drop(folder, "cls.predictions.transform.dense.bias")
    assert "weights are missing: cls.predictions.transform.dense.bias" in complaint(folder)


def test_unexpected_weights_are_listed_by_name(folder):
    tensors = load_file(folder / "model.safetensors") | {"bert.adapter.down": torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors")
    assert read_model(folder).notes == (
        "weights that do not belong to any part of bert were skipped: bert.adapter.down",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_rejected_by_name(folder, value):
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.pooler.dense.bias"][3] = value
    save_file(tensors, folder / "model.safetensors")
    assert "bert.pooler.dense.bias holds NaN or infinite values" in complaint(folder)


def test_whole_numbers_are_no_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["bert.pooler.dense.bias"] = tensors["bert.pooler.dense.bias"].int()
    save_file(tensors, folder / "model.safetensors")
    assert "bert.pooler.dense.bias holds torch.int32" in complaint(folder)


def test_truncated_and_oversized_files_are_rejected(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for broken in (b"", whole[:5], whole[: len(whole) // 2], whole + b"more", b"\xff" * 64):
        file.write_bytes(broken)
        assert "is not a whole safetensors file" in complaint(folder)
    file.write_bytes(struct.pack("<Q", 2**40) + whole[8:])
    assert "is not a whole safetensors file" in complaint(folder)


class Hostile:
    def __reduce__(self):
        return (open, ("hostile-was-here", "w"))


def test_a_pickle_that_would_run_code_is_rejected_and_runs_none(folder, monkeypatch):
    (folder / "model.safetensors").unlink()
    monkeypatch.chdir(folder)
    torch.save({"bert.pooler.dense.bias": Hostile()}, folder / "pytorch_model.bin")
    assert "is not a whole weights file, or contains more than tensors" in complaint(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    assert "is not a whole weights file, or contains more than tensors" in complaint(folder)
    assert not (folder / "hostile-was-here").exists()
    torch.save([1, 2], folder / "pytorch_model.bin")
    assert "contains something other than named tensors" in complaint(folder)


@pytest.mark.parametrize(
    "held",
    [
        {1: torch.zeros(2)},
        {"a": torch.zeros(2, 2).to_sparse()},
        {"a": torch.zeros(2, 2).to_sparse_csr()},
        {"a": torch.zeros(2, device="meta")},
        {"a": 3},
    ],
    ids=["number-as-name", "sparse", "csr", "meta", "number"],
)
def test_old_files_with_odd_contents_are_rejected(folder, held):
    (folder / "model.safetensors").unlink()
    torch.save(held, folder / "pytorch_model.bin")
    assert "contains something other than named tensors" in complaint(folder)


def test_old_files_of_junk_are_rejected(folder):
    (folder / "model.safetensors").unlink()
    for junk in (b"", b"junk", b"PK\x03\x04", b"\x80\x02", b"\x00" * 100):
        (folder / "pytorch_model.bin").write_bytes(junk)
        assert "is not a whole weights file" in complaint(folder)


def test_one_number_that_is_seen_a_billion_times_is_no_weight(folder):
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    name = next(iter(held))
    torch.save(held | {name: torch.zeros(1).expand(2**30, 1)}, folder / "pytorch_model.bin")
    assert "contains something other than named tensors" in complaint(folder)


def test_packed_entries_are_refused_before_they_are_unpacked(folder):
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("archive/data.pkl", b"x")
        packed.writestr("archive/data/0", bytes(50_000_000))
    assert "its entries unpack to more than the file" in complaint(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_pipe_in_a_model_folder_is_refused(name, folder):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match="is a pipe or a device"):
        bertsmith.load(folder)


def test_a_git_lfs_pointer_is_distinguished(folder):
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    assert "is only a git-lfs pointer; run git lfs pull there" in complaint(folder)


@pytest.mark.parametrize(
    "weight", [torch.zeros(()), torch.zeros(0, 32), torch.zeros(2, 3, 4)], ids=["0", "none", "3"]
)
def test_an_output_layer_of_another_form_is_rejected(tmp_path, weight):
    write_model(tmp_path, Model(tiny_network(heads={"pooler": 0, "classify": 2})))
    save_file(
        load_file(tmp_path / "model.safetensors") | {"classifier.weight": weight},
        tmp_path / "model.safetensors",
    )
    assert "classifier.weight is" in complaint(tmp_path)


def test_eight_bit_floats_are_no_weights_and_overflow_is_seen(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "bert.pooler.dense.bias"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    assert f"{name} holds torch.float8_e4m3fn" in complaint(folder)
    save_file(tensors | {name: torch.full((32,), 1e300, dtype=torch.float64)}, folder / "model.safetensors")
    assert f"{name} holds NaN or infinite values" in complaint(folder)


@pytest.mark.parametrize("labels", [["a", "b"], {"x": "y"}, 5], ids=str)
def test_labels_that_are_not_numbered_are_rejected(folder, labels):
    change_config(folder, id2label=labels)
    assert "id2label is" in complaint(folder)


def test_null_in_a_config_means_the_default(folder):
    before = read_model(folder).network.config
    nulls = (
        "pad_token_id",
        "position_embedding_type",
        "tie_word_embeddings",
        "classifier_dropout",
        "id2label",
    )
    change_config(folder, **dict.fromkeys(nulls))
    assert read_model(folder).network.config == before


def test_an_untied_encoder_without_masked_words_is_fine(tmp_path):
    write_model(tmp_path, Model(tiny_network(heads={"pooler": 0})))
    change_config(tmp_path, tie_word_embeddings=False)
    assert read_model(tmp_path).notes == ()


def test_modernbert_keeps_an_odd_window_and_needs_even_heads(tmp_path):
    network = tiny_network("modernbert", heads={})
    write_model(tmp_path, Model(network))
    change_config(tmp_path, local_attention=7)
    write_model(tmp_path, read_model(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["local_attention"] == 7
    change_config(tmp_path, num_attention_heads=32)
    assert "rotary positions need heads of an even width, not 1" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({}, "lacks a weight_map"),
        ({"weight_map": {"a": "../../outside.safetensors"}}, "which is not in the folder"),
        ({"weight_map": {"a": 3}}, "which is not in the folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "which is not in the folder"),
    ],
    ids=str,
)
def test_an_index_that_points_elsewhere_is_rejected(folder, index, said):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert said in complaint(folder)


def test_an_index_that_names_what_a_shard_lacks_is_rejected(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "part.safetensors"}})
    )
    assert "x is missing, but the index lists it here" in complaint(folder)


@given(st.data())
def test_random_damage_gives_a_clear_error_or_a_readable_model(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    write_model(folder, Model(tiny_network(heads={})))
    file = folder / "model.safetensors"
    held = bytearray(file.read_bytes())
    header = 8 + struct.unpack("<Q", held[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        held[data.draw(st.integers(0, header + 64))] = data.draw(st.integers(0, 255))
    file.write_bytes(held[: data.draw(st.integers(0, len(held)))] if data.draw(st.booleans()) else held)
    try:
        read_model(folder)
    except UserError as error:
        assert "\n" not in str(error)


def test_nothing_half_written_stays_when_a_save_fails(tmp_path, monkeypatch):
    target = tmp_path / "model"
    network = tiny_network()
    write_model(target, Model(network))
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(TypeError):
        write_model(target, Model(network, extras={"note": {1, 2}}))  # a set is no JSON
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]

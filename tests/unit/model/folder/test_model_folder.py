import json
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.folder.model_folder import Model, head_outputs, read_model, write_model
from bertsmith.packed import pack
from tests.folders import change_config, complaint, drop
from tests.oracles import CLASSES, oracle_class, saved_oracle
from tests.tiny import TRANSFORMERS, tiny_network


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path, Model(tiny_network()))
    return tmp_path


every_member = pytest.mark.parametrize("model_type", TRANSFORMERS)


def heads_of(model_type, architecture):
    outputs = {"classify": 5, "tag": 4, "nsp": 2, "sop": 2, "span": 2, "choice": 1, "replaced": 1}
    return {head: outputs.get(head, 0) for head in ARCHITECTURES[model_type].classes[architecture]}


PUBLISHED_CLASSES = [
    (kind, name)
    for kind in TRANSFORMERS
    for name in ARCHITECTURES[kind].classes
    if name != "GPT2DoubleHeadsModel"  # only one of its two heads is read, so no writer takes its name
]


@pytest.mark.parametrize(("model_type", "architecture"), PUBLISHED_CLASSES)
def test_saving_then_loading_is_bit_identical_and_transformers_opens_it_too(
    model_type, architecture, tmp_path
):
    network = tiny_network(model_type, heads=heads_of(model_type, architecture))
    write_model(tmp_path, Model(network))
    again = read_model(tmp_path)
    assert again.notes == ()
    assert head_outputs(again.network) == head_outputs(network)
    assert again.network.config == network.config
    ours, theirs = network.state_dict(), again.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    opened, report = getattr(transformers, architecture).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    text = [5, 6, 7, 8]
    with torch.no_grad():
        outputs = opened.eval().base_model(input_ids=torch.tensor([text])).last_hidden_state[0]
        assert (network(pack([text])) - outputs).abs().max() <= 2e-5


@every_member
def test_a_folder_of_transformers_comes_back_to_it_unchanged(model_type, tmp_path):
    theirs = saved_oracle(tmp_path / "a", model_type, "ForSequenceClassification", num_labels=3)
    write_model(tmp_path / "b", read_model(tmp_path / "a"))
    again = getattr(transformers, f"{CLASSES[model_type]}ForSequenceClassification").from_pretrained(
        tmp_path / "b"
    )
    before, after = theirs.state_dict(), again.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before | after)
    assert again.config.id2label == theirs.config.id2label


ALL_OUTPUTS = {"classify": 5, "tag": 4, "nsp": 2, "sop": 2, "span": 2, "choice": 1, "replaced": 1}


@given(st.data())
def test_any_set_of_heads_comes_back_or_is_rejected(tmp_path_factory, data):
    model_type = data.draw(st.sampled_from(sorted(ARCHITECTURES)))
    chosen = data.draw(st.sets(st.sampled_from(sorted(ARCHITECTURES[model_type].heads))))
    network = tiny_network(model_type, heads={head: ALL_OUTPUTS.get(head, 0) for head in sorted(chosen)})
    folder = tmp_path_factory.mktemp("heads")
    try:
        write_model(folder / "model", Model(network))
    except UserError as error:
        assert "have the same published names; remove one" in str(error)
        assert list(folder.iterdir()) == []
        return
    again = read_model(folder / "model")
    ours, theirs = network.state_dict(), again.network.state_dict()
    assert set(ours) == {name for name in theirs if name.split(".")[1] not in again.untrained}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_tagger_without_architectures_is_no_classifier_without_pooler(tmp_path):
    write_model(tmp_path, Model(tiny_network(heads={"tag": 4})))
    change_config(tmp_path, architectures="DROP")
    model = read_model(tmp_path)
    assert head_outputs(model.network) == {"tag": 4} and model.notes == ()


def test_a_decoder_that_is_not_the_embedding_is_kept_and_reported(folder):
    tensors = load_file(folder / "model.safetensors")
    twice = tensors | {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()
    }
    save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    model = read_model(folder)
    assert model.notes == () and model.network.config.tied
    twice["cls.predictions.decoder.weight"][0, 0] += 1
    save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    model = read_model(folder)
    (note,) = model.notes
    assert "the decoder of masked words differs from the word embeddings" in note
    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    batch = pack([[5, 6, 7]])
    with torch.no_grad():
        ours = model.network.word_scores(model.network(batch), torch.arange(3))
        assert (ours - theirs(batch.tokens_T[None]).logits[0]).abs().max() <= 2e-5


@every_member
def test_an_untied_decoder_comes_from_transformers_and_goes_back_to_it(model_type, tmp_path):
    untied = saved_oracle(tmp_path / "a", model_type, "ForMaskedLM", tie_word_embeddings=False)
    model = read_model(tmp_path / "a")
    assert model.notes == () and not model.network.config.tied
    write_model(tmp_path / "b", model)
    assert read_model(tmp_path / "b").network.config == model.network.config
    again = oracle_class(model_type, "ForMaskedLM").from_pretrained(tmp_path / "b").eval()
    batch = pack([[5, 6, 7, 8]])
    with torch.no_grad():
        ours = model.network.scores_of_words(model.network(batch))
        for theirs in (untied, again):
            assert (ours - theirs(input_ids=batch.tokens_T[None]).logits[0]).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("model_type", "change", "told"),
    [
        ("gpt2", {"direction": "both"}, "a gpt2 model cannot express direction = both, only left-to-right"),
        ("distilbert", {"norm_eps": 1e-5}, "a distilbert model cannot express norm_eps = 1e-05, only 1e-12"),
    ],
)
def test_what_would_be_read_as_another_model_is_not_saved(model_type, change, told, tmp_path):
    network = tiny_network(model_type, {})
    network.config = replace(network.config, **change)
    with pytest.raises(UserError, match=told):
        write_model(tmp_path / "model", Model(network))
    assert not (tmp_path / "model").exists()


def test_names_of_a_parallel_wrapper_are_read(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert read_model(folder).notes == ()


def test_files_can_be_read_by_others_and_appear_at_once(tmp_path):
    write_model(tmp_path / "model", Model(tiny_network()))
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in (tmp_path / "model").iterdir())
    assert (tmp_path / "model").stat().st_mode & 0o055 == 0o055
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_while_moving_keeps_the_old_weights(folder, monkeypatch):
    write_model(folder, Model(tiny_network(seed=1)), shard_bytes=20_000)
    before = read_model(folder).network.state_dict()

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(UserError, match="cannot be written"):
        write_model(folder, Model(tiny_network(seed=2)))
    after = read_model(folder).network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_labels_of_another_number_than_the_outputs_are_rejected(tmp_path):
    write_model(tmp_path, Model(tiny_network(heads={"pooler": 0, "classify": 2})))
    change_config(tmp_path, id2label={"0": "a", "1": "b", "2": "c"})
    assert "id2label names 3 labels, but the head has 2 outputs" in complaint(tmp_path)


def test_what_leads_to_someones_code_is_not_written_back(folder):
    change_config(folder, auto_map={"AutoModel": "x.Y"}, _name_or_path="a/b", num_labels=7, note="kept")
    write_model(folder, read_model(folder))
    config = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config and "_name_or_path" not in config and "num_labels" not in config
    assert config["note"] == "kept"


def test_electras_summary_is_rejected_unless_it_is_the_published_one(tmp_path):
    write_model(tmp_path, Model(tiny_network("electra", heads={"choice": 1})))
    change_config(tmp_path, summary_activation="tanh")
    assert "summary_activation is 'tanh'; only 'gelu' is supported" in complaint(tmp_path)


def test_a_config_that_asks_for_a_million_blocks_is_rejected_at_once(tmp_path):
    write_model(tmp_path, Model(tiny_network("albert", heads={})))
    change_config(tmp_path, num_hidden_layers=1024, num_hidden_groups=1024, inner_group_num=64)
    assert "inner_group_num is 64" in complaint(tmp_path)


def test_labels_are_kept_and_named(tmp_path):
    extras = {"id2label": {"1": "good", "0": "bad"}, "label2id": {"good": 1, "bad": 0}}
    network = tiny_network(heads={"pooler": 0, "classify": 2})
    write_model(tmp_path, Model(network, extras))
    assert read_model(tmp_path).labels() == ("bad", "good")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "BertForSequenceClassification"
    ]


def test_a_classifier_without_labels_gets_numbered_ones(tmp_path):
    write_model(tmp_path, Model(tiny_network(heads={"pooler": 0, "classify": 3})))
    assert read_model(tmp_path).labels() == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_shards_hold_the_same_as_one_file_and_a_later_save_leaves_none_behind(tmp_path):
    network = tiny_network()
    write_model(tmp_path, Model(network), shard_bytes=20_000)
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    again = read_model(tmp_path).network.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in network.state_dict().items())
    _, report = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    write_model(tmp_path, Model(network))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_half_precision_weights_are_read_as_asked(tmp_path):
    write_model(tmp_path, Model(tiny_network().bfloat16()))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert read_model(tmp_path).network.encoder.embeddings.words.weight.dtype == torch.float32
    half = read_model(tmp_path, dtype=torch.bfloat16).network
    assert half.encoder.embeddings.words.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_stay_so_until_one_of_them_changes(dtype, tmp_path):
    network = tiny_network(heads={"pooler": 0, "classify": 3}).to(dtype)
    network.heads["classify"].output.float()  # as training keeps it
    write_model(tmp_path / "given", Model(network))
    model = read_model(tmp_path / "given")
    assert model.network.encoder.embeddings.words.weight.dtype == torch.float32
    write_model(tmp_path / "again", model)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "given" / file).read_bytes()
    with torch.no_grad():
        model.network.encoder.blocks[0].attention.output.weight[0, 0] = 1 / 3
    write_model(tmp_path / "trained", model)
    assert json.loads((tmp_path / "trained" / "config.json").read_text())["dtype"] == "float32"
    changed = read_model(tmp_path / "trained").network.encoder.blocks[0].attention.output.weight
    assert changed[0, 0] == torch.tensor(1 / 3)


def test_old_weight_files_with_old_names_are_read(tmp_path):
    theirs = saved_oracle(tmp_path, "bert", "ForPreTraining")
    old = {}
    for name, tensor in theirs.state_dict().items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[name] = tensor.clone()
    old["bert.embeddings.position_ids"] = torch.arange(514)[None]
    (tmp_path / "model.safetensors").unlink()
    torch.save(old, tmp_path / "pytorch_model.bin")
    model = read_model(tmp_path)
    assert model.notes == ()
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states[-1][0]
        assert (model.network(pack([[5, 6, 7]])) - expected).abs().max() <= 2e-5


def test_a_base_model_without_pooler_loads_and_its_classifier_gets_a_fresh_one_and_says_so(tmp_path):
    write_model(tmp_path, Model(tiny_network(heads={})))
    assert read_model(tmp_path).notes == ()
    write_model(tmp_path, Model(tiny_network(heads={"pooler": 0, "classify": 2})))
    drop(tmp_path, "bert.pooler.dense.weight", "bert.pooler.dense.bias")
    model = read_model(tmp_path)
    assert model.notes == ("not in the folder and freshly initialised, so train before use: pooler",)
    assert set(model.network.heads) == {"classify", "pooler"}

"""Adapter folders: those that peft writes are opened, and what is written is what peft would have written.

What peft writes was recorded from peft 0.21.2 over transformers 5.22.2: config, names and shapes.
"""

import json
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.core.errors import UserError
from bertsmith.inference.adapter_folder import base_folder, write_adapter
from bertsmith.inference.embedded_models import default_model
from bertsmith.inference.loaded_model import load
from bertsmith.inference.model_path import is_adapter
from bertsmith.model.architecture import published_in
from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.lora import LoraShape, adapters_of, add_fresh_adapters
from bertsmith.model.network import add_fresh_head, published_names
from bertsmith.recipe.finetuning_schema import Target
from bertsmith.tasks.objective import freeze_encoder
from tests.tiny import TRANSFORMERS, tiny_network

PEFT_CONFIG = {
    **{"alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None},
    **{"base_model_name_or_path": "models/toy", "bias": "none", "corda_config": None},
    **{"ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False},
    **{"inference_mode": True, "init_lora_weights": True, "kasa_config": None, "layer_replication": None},
    **{"layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8},
    **{"lora_bias": False, "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None},
    **{"megatron_core": "megatron.core", "modules_to_save": ["classifier", "score"]},
    **{"monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16},
    **{"r": 4, "rank_pattern": {}, "revision": None, "target_modules": ["value", "query"]},
    **{"target_parameters": None, "task_type": "SEQ_CLS", "trainable_token_indices": None},
    **{"use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False},
    "velora_config": None,
}
LAYER = "base_model.model.bert.encoder.layer.{}.attention.self.{}.lora_{}.weight"
TEXTS = ["the cat sits under the tree", "warm tea and cold rain"]


def peft_shapes(width=64, labels=3):
    """Names and shapes of a peft file over the toy model: rank 4, query and value, the classifier whole."""
    low_rank = {
        LAYER.format(layer, name, part): (4, width) if part == "A" else (width, 4)
        for layer in range(2)
        for name in ("query", "value")
        for part in "AB"
    }
    classifier = {"weight": (labels, width), "bias": (labels,)}
    return low_rank | {f"base_model.model.classifier.{kind}": shape for kind, shape in classifier.items()}


@pytest.fixture
def theirs(folder, tmp_path):
    """A folder as peft writes it, and what was drawn for it."""
    chance = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.empty(shape).normal_(0, 0.3, generator=chance) for name, shape in peft_shapes().items()
    }
    place = tmp_path / "theirs"
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors", {"format": "pt"})
    write_config(place, base_model_name_or_path=str(folder))
    return place


def write_config(place, **changes):
    (place / "adapter_config.json").write_text(json.dumps(PEFT_CONFIG | changes))


def changed_tensors(place, change):
    file = place / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


# ---- reading


def test_a_folder_of_peft_is_opened_over_its_base_with_labels_that_it_does_not_name(theirs):
    bert = load(theirs, device="cpu")
    assert bert.abilities == ("classify", "embed", "look")
    assert not any(adapters_of(bert.model.network))
    assert [*bert.classify(TEXTS)[0].probabilities] == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_weights_of_a_folder_of_peft_are_those_that_its_formula_gives(theirs, bert):
    tensors = load_file(theirs / "adapter_model.safetensors")
    found, before = (
        each.model.network.encoder.blocks[1].attention.project.weight.detach().chunk(3)
        for each in (load(theirs, device="cpu"), bert)
    )
    for number, name in ((0, "query"), (2, "value")):
        low_rank = tensors[LAYER.format(1, name, "B")] @ tensors[LAYER.format(1, name, "A")]
        assert torch.allclose(found[number], before[number] + 8 / 4 * low_rank, rtol=0, atol=1e-6)
    assert torch.equal(found[1], before[1])


def test_merged_and_unmerged_answer_alike_and_the_base_as_before(theirs, folder):
    base = load(folder, device="cpu")
    before = base.embed(TEXTS)
    merged, unmerged = load(theirs, device="cpu"), base.with_adapter(theirs)
    for one, other in zip(merged.classify(TEXTS), unmerged.classify(TEXTS), strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
    assert torch.equal(base.embed(TEXTS), before)
    assert "fill" in base.abilities and "fill" not in unmerged.abilities


def test_what_an_adapter_does_not_change_is_in_memory_once(theirs, folder):
    base = load(folder, device="cpu")
    mine = dict(base.with_adapter(theirs).model.network.named_parameters())
    for name, parameter in base.model.network.named_parameters():
        if name in mine:
            assert mine[name].data_ptr() == parameter.data_ptr()
    own = sum(each.numel() for name, each in mine.items() if "adapters" in name or "classify" in name)
    assert own == sum(each.numel() for each in load_file(theirs / "adapter_model.safetensors").values())


def test_saving_an_unmerged_model_writes_a_merged_one(theirs, folder, tmp_path):
    unmerged = load(folder, device="cpu").with_adapter(theirs)
    unmerged.save(tmp_path / "merged")
    saved = load(tmp_path / "merged", device="cpu")
    assert not is_adapter(tmp_path / "merged")
    for one, other in zip(saved.classify(TEXTS), unmerged.classify(TEXTS), strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)


def test_8_bit_weights_take_no_adapter_but_a_merged_one_can_be_rounded(theirs, folder):
    with pytest.raises(UserError, match="8-bit weights do not support adapters"):
        load(folder, device="cpu", precision="int8").with_adapter(theirs)
    exact, rounded = (load(theirs, device="cpu", precision=each).classify(TEXTS) for each in ("fp32", "int8"))
    assert exact[0].probability == pytest.approx(rounded[0].probability, abs=0.05)


def test_the_scaling_of_rslora_is_honoured(theirs, bert):
    write_config(theirs, base_model_name_or_path=load_base(theirs), use_rslora=True)
    adapter = dict(adapters_of(bert.with_adapter(theirs).model.network))
    assert {each.scaling for each in adapter.values()} == {8 / 2}


def load_base(place):
    return json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only LORA is supported"),
        ({"use_dora": True}, "use_dora is True, which bertsmith does not support"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"alpha_pattern": {"query": 4}}, "alpha_pattern is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"some_new_thing": True}, "some_new_thing is True"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much', not a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, not a number"),
        ({"task_type": None}, "does not name the head of its weights"),
    ],
)
def test_what_is_not_computed_here_is_refused(theirs, changes, complaint):
    write_config(theirs, base_model_name_or_path=load_base(theirs), **changes)
    with pytest.raises(UserError, match=rf"adapter_config\.json: {complaint}"):
        load(theirs, device="cpu")


def narrower(tensors):
    name = LAYER.format(0, "query", "A")
    tensors[name] = tensors[name][:, :32].contiguous()


def a_number(tensors):
    tensors[LAYER.format(0, "query", "A")] = torch.tensor(1.0)


def without_b(tensors):
    del tensors[LAYER.format(0, "query", "B")]


def of_embeddings(tensors):
    tensors["base_model.model.bert.embeddings.word_embeddings.lora_embedding_A"] = torch.ones(2, 4)


def elsewhere(tensors):
    tensors["base_model.model.bert.encoder.layer.9.output.dense.lora_A.weight"] = torch.ones(4, 256)


def not_a_number(tensors):
    tensors[LAYER.format(0, "query", "A")][0, 0] = float("nan")


def stuffed(tensors):
    tensors["base_model.model.score.weight"] = torch.ones(2, 64)


def headless(tensors):
    del tensors["base_model.model.classifier.bias"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (narrower, "A and B of .*layer.0.attention.self.query have the shapes .* but the layer is 64 x 64"),
        (a_number, "A and B of .*layer.0.attention.self.query have the shapes"),
        (without_b, "A and B of .*layer.0.attention.self.query have the shapes"),
        (of_embeddings, "lora_embedding_A is not part of plain LoRA"),
        (elsewhere, "layer.9.output.dense is not a linear layer of the base"),
        (not_a_number, "query.lora_A.weight .*contains NaN"),
        (stuffed, "fit none of the heads of bert: score.weight"),
        (headless, "weights are missing: classifier.bias"),
    ],
)
def test_weights_that_do_not_fit_are_rejected(theirs, change, complaint):
    changed_tensors(theirs, change)
    with pytest.raises(UserError, match=complaint) as caught:
        load(theirs, device="cpu")
    assert "\n" not in str(caught.value) and "adapter_model.safetensors" in str(caught.value)


# ---- the base


def test_a_base_is_found_beside_the_adapter_by_its_name_or_where_it_is_said_to_be(theirs, folder, tmp_path):
    (tmp_path / "base").symlink_to(folder)
    write_config(theirs, base_model_name_or_path="../base")
    assert base_folder(theirs).resolve() == folder.resolve()
    write_config(theirs, base_model_name_or_path=default_model().name)
    assert base_folder(theirs) == default_model()
    write_config(theirs, base_model_name_or_path="org/nowhere")
    with pytest.raises(
        UserError, match=r"its base model 'org/nowhere' is not on this machine.*`base=FOLDER`"
    ):
        load(theirs)
    assert load(theirs, device="cpu", base=folder).classify(TEXTS)
    with pytest.raises(UserError, match="is not an adapter, so it does not need a base"):
        load(folder, base=folder)
    with pytest.raises(UserError, match="the base of an adapter is an adapter itself"):
        load(theirs, base=theirs)


@pytest.mark.parametrize("named", ["~nobody-of-this-name/base", "a\0b", "x" * 5000, "", None, 5, ["a"]])
def test_a_base_that_cannot_be_a_folder_is_one_line(theirs, named):
    write_config(theirs, base_model_name_or_path=named)
    with pytest.raises(UserError, match=r"adapter_config\.json: .*base model.*`base=FOLDER`"):
        load(theirs)


# ---- writing


def trained(model_type, head, *targets):
    """A network with adapters and a fresh head, its encoder frozen."""
    network = tiny_network(model_type, {})
    fresh = add_fresh_head(network, head, 3, torch.Generator().manual_seed(0))
    freeze_encoder(network, fresh=[name for name in fresh if name != "pooler"])
    add_fresh_adapters(network, targets, LoraShape(4, 8.0), torch.Generator().manual_seed(0))
    return network


def test_what_is_written_has_the_names_and_keys_of_peft(bert, tmp_path):
    network = trained("bert", "classify", "query", "value")
    write_adapter(tmp_path, network, "classify", shape=LoraShape(4, 8.0), base="models/toy")
    shapes = {
        name: tuple(each.shape) for name, each in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    wanted = peft_shapes(width=32)
    wanted |= {LAYER.format(2, *name_part(name)): shape for name, shape in wanted.items() if ".1." in name}
    assert shapes == wanted
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written | {"modules_to_save": ["classifier", "score"], "target_modules": ["value", "query"]} == {
        key: PEFT_CONFIG[key] for key in written
    }
    assert written["target_modules"] == ["query", "value"]


def name_part(name):
    *_, layer, part, _ = name.split(".")
    return layer, part.removeprefix("lora_")


def test_peft_is_told_which_layers_hold_their_weights_turned(tmp_path):
    write_adapter(tmp_path, trained("gpt2", "tag", "query"), "tag", shape=LoraShape(4, 8.0), base="base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] and config["target_modules"] == ["c_attn"]


@pytest.mark.parametrize(
    "model_type", [name for name in TRANSFORMERS if "choice" in ARCHITECTURES[name].heads]
)
def test_peft_finds_the_adapted_layers_and_no_others(model_type, tmp_path):
    network = trained(model_type, "choice", *(set(get_args(Target)) - {"output"}))
    write_adapter(tmp_path, network, "choice", shape=LoraShape(4, 8.0), base="base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    heads = dict.fromkeys(ARCHITECTURES[model_type].heads, 0)
    layers = {name.rpartition(".")[0] for name in published_in(published_names(network.config, heads))}
    # peft takes every layer whose name is a target, or ends in one after a dot.
    found = {
        name for name in layers if any(f".{name}".endswith(f".{end}") for end in config["target_modules"])
    }
    assert found == {name for name, _ in adapters_of(network)}
    assert config["auto_mapping"]["base_model_class"].endswith("ForMultipleChoice")

"""A student of some of its teacher's layers."""

import pytest
import torch

from bertsmith.core.errors import UserError
from bertsmith.model.architectures.distilbert import without_segments
from bertsmith.model.layer_subset import (
    evenly_spaced,
    freeze_positions,
    network_of_layers,
)
from bertsmith.packed import pack
from tests.tiny import tiny_encoder_config, tiny_network

TEXTS = [[2, 5, 6, 4, 7, 8, 3], [2, 9, 4, 10, 3]]


def test_layers_are_taken_from_the_first_to_the_last():
    assert evenly_spaced(12, 6) == (0, 2, 4, 7, 9, 11)  # DistilBERT, extract_distilbert.py
    assert evenly_spaced(12, 3) == (0, 6, 11)
    assert evenly_spaced(12, 1) == (0,)
    for layers in range(1, 25):
        for wanted in range(1, layers + 1):
            chosen = evenly_spaced(layers, wanted)
            assert len(set(chosen)) == wanted and list(chosen) == sorted(chosen)
        assert evenly_spaced(layers, layers) == tuple(range(layers))


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert", "deberta-v2", "ernie", "distilbert"])
def test_a_student_computes_what_its_layers_of_the_teacher_compute(model_type):
    teacher, batch = tiny_network(model_type, {"mlm": 0}), pack(TEXTS)
    config = teacher.config.subset((0, 2))
    student = network_of_layers(teacher, (0, 2), config)
    teacher.encoder.order = (0, 2)
    expected = teacher(batch)
    torch.testing.assert_close(student(batch), expected)
    torch.testing.assert_close(student.scores_of_words(expected), teacher.scores_of_words(expected))
    assert student.config.layers == 2 and student.config.model_type == model_type


def test_an_albert_keeps_its_one_block():
    teacher = tiny_network("albert", {"mlm": 0})
    student = network_of_layers(teacher, (0, 2), teacher.config.subset((0, 2)))
    teacher.encoder.order = (0, 0)
    torch.testing.assert_close(student(pack(TEXTS)), teacher(pack(TEXTS)))
    with pytest.raises(UserError, match="in 2 groups"):
        tiny_encoder_config("albert", groups=2).subset((0, 2))


def test_a_bert_becomes_a_distilbert_that_sees_the_same_first_segment():
    teacher = tiny_network("bert", {"pooler": 0, "mlm": 0, "nsp": 2})
    config = without_segments(teacher.config.subset((0, 1, 2)))
    student = network_of_layers(teacher, (0, 1, 2), config)
    assert (config.model_type, config.segments, config.head_dropout) == ("distilbert", 0, 0.2)
    assert list(student.heads) == ["mlm"]
    torch.testing.assert_close(student(pack(TEXTS)), teacher(pack(TEXTS)))


@pytest.mark.parametrize(
    "config", [tiny_encoder_config("roberta"), tiny_encoder_config("bert", norm_eps=1e-5)]
)
def test_what_a_distilbert_cannot_be_stays_what_it_is(config):
    assert without_segments(config) == config


def test_a_teacher_is_not_changed_by_what_its_student_learns():
    teacher = tiny_network("bert", {"mlm": 0})
    before = {name: each.clone() for name, each in teacher.state_dict().items()}
    student = network_of_layers(teacher, (0,), without_segments(teacher.config.subset((0,))))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(torch.equal(each, before[name]) for name, each in teacher.state_dict().items())


def test_local_and_global_layers_stay_what_they_are():
    config = tiny_encoder_config("modernbert", layers=6, global_layers=(0, 3))
    assert config.subset((0, 2, 3, 5)).global_layers == (0, 2)


def test_pruned_layers_keep_their_sizes():
    config = tiny_encoder_config(layer_heads=(4, 3, 2), layer_inner=(64, 8, 16)).subset(
        (0, 2), where="distill.layers"
    )
    assert (config.layer_heads, config.layer_inner) == ((4, 2), (64, 16))


@pytest.mark.parametrize("layers", [(1, 2), (0, 1, 0)])
def test_a_modernbert_begins_with_its_first_layer(layers):
    with pytest.raises(UserError, match="stay the first"):
        tiny_encoder_config("modernbert").subset(layers)


def test_a_layer_that_is_none_is_named():
    with pytest.raises(UserError, match="the teacher has 3 layers, and layer 3, counted from 0, is not one"):
        tiny_encoder_config("bert").subset((0, 3))


def test_a_teacher_without_an_mlm_head_gives_a_student_without_one():
    teacher = tiny_network("bert", {"pooler": 0})
    assert not network_of_layers(teacher, (0,), teacher.config.subset((0,))).heads


def test_positions_are_frozen_where_there_is_a_table():
    network, rotary = tiny_network("bert", {}), tiny_network("modernbert", {})
    assert freeze_positions(network) and not freeze_positions(rotary)
    frozen = [name for name, each in network.named_parameters() if not each.requires_grad]
    assert frozen == ["encoder.embeddings.added.position.weight"]
    assert all(each.requires_grad for each in rotary.parameters())

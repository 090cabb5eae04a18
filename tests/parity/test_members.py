"""Every member against transformers: hidden states, pooled output and the scores of every head."""

import random

import pytest
import torch
import transformers

from bertsmith.model.architectures.registry import ARCHITECTURES
from bertsmith.model.folder.model_folder import read_model, write_model
from bertsmith.packed import PackedBatch, pack, unpack
from tests.oracles import CLASSES, saved_oracle
from tests.tiny import TRANSFORMERS

FP32 = 2e-5
every_member = pytest.mark.parametrize("model_type", TRANSFORMERS)
WITHOUT_SEGMENTS = ("roberta", "xlm-roberta", "camembert", "distilbert", "modernbert", "deberta-v2", "gpt2")
LENGTHS = [5, 17, 512, 1, 5, 33]


def pairs_of(lengths: list[int], seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and segments: the last part of every text of more than one token is its second segment."""
    rng = random.Random(seed)
    ids = [[rng.randrange(5, 99) for _ in range(length)] for length in lengths]
    segments = []
    for length in lengths:
        first = rng.randint(1, length)
        segments.append([0] * first + [1] * (length - first))
    return ids, segments


def oracle_output(model, model_type: str, ids: list[int], segments: list[int], **more):
    inputs = {"input_ids": torch.tensor([ids]), **more}
    if model_type not in WITHOUT_SEGMENTS:
        inputs["token_type_ids"] = torch.tensor([segments])
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True)


@every_member
@pytest.mark.parametrize(
    "lengths", [LENGTHS, [3 + 7 * n % 61 for n in range(64)]], ids=["with-512", "64-ragged"]
)
def test_hidden_states_and_pooled_output_equal_transformers(model_type, lengths, tmp_path):
    theirs = saved_oracle(tmp_path, model_type, "Model")
    network = read_model(tmp_path).network
    ids, segments = pairs_of(lengths)
    batch = pack(ids, segments)
    with torch.no_grad():
        states = [unpack(each, batch.layout) for each in network.encoder.hidden_states(batch)]
        pooled = network.pooled(network(batch), batch.layout) if "pooler" in network.heads else None
    for number, (text, segment) in enumerate(zip(ids, segments, strict=True)):
        expected = oracle_output(theirs, model_type, text, segment)
        for ours, layer in zip(states, expected.hidden_states, strict=True):
            assert (ours[number] - layer[0]).abs().max() <= FP32
        if pooled is not None:
            assert (pooled[number] - expected.pooler_output[0]).abs().max() <= FP32


DEBERTA_POSITIONS = [
    {"position_buckets": 16, "max_position_embeddings": 512},
    {"position_buckets": 256, "max_position_embeddings": 512},
    {"position_buckets": 32, "max_relative_positions": 100},
    {"position_buckets": -1, "max_relative_positions": 24},
    {"type_vocab_size": 2},
]


@pytest.mark.parametrize("changes", DEBERTA_POSITIONS, ids=str)
def test_debertas_relative_positions_are_those_of_transformers(changes, tmp_path):
    theirs = saved_oracle(tmp_path, "deberta-v2", "ForSequenceClassification", num_labels=3, **changes)
    model = read_model(tmp_path)
    ids, segments = pairs_of([400, 3, 70])
    batch = pack(ids, segments)
    with torch.no_grad():
        hidden = model.network(batch)
        ours = model.network.scores("classify", hidden, batch.layout)
        maps = model.network.encoder.heads.maps(batch)
        for number, (text, segment) in enumerate(zip(ids, segments, strict=True)):
            inputs = {"input_ids": torch.tensor([text]), "token_type_ids": torch.tensor([segment])}
            expected = theirs(**inputs, output_attentions=True, output_hidden_states=True)
            assert (unpack(hidden, batch.layout)[number] - expected.hidden_states[-1][0]).abs().max() <= 1e-5
            assert (ours[number] - expected.logits[0]).abs().max() <= 1e-5
            for layer, attentions in enumerate(expected.attentions):
                assert (maps[layer][number] - attentions[0]).abs().max() <= 1e-5


def test_debertas_masked_words_are_read_under_microsofts_names_too(tmp_path):
    theirs = saved_oracle(tmp_path, "deberta-v2", "ForMaskedLM", legacy=False)
    model = read_model(tmp_path)
    assert model.notes == ()
    write_model(tmp_path / "copy", model)
    again = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "copy").eval()
    batch = pack([[5, 6, 7, 8]])
    with torch.no_grad():
        ours = model.network.word_scores(model.network(batch), torch.arange(4))
        for each in (theirs, again):
            assert (ours - each(input_ids=batch.tokens_T[None]).logits[0]).abs().max() <= FP32


@pytest.mark.parametrize("heads", [1, 3, 8], ids=lambda heads: f"{heads}-heads")
def test_any_number_of_heads_scales_by_its_own_width(heads, tmp_path):
    theirs = saved_oracle(tmp_path, "bert", "Model", num_attention_heads=heads, hidden_size=48)
    network = read_model(tmp_path).network
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0]
        assert (network(pack([[5, 6, 7]])) - expected).abs().max() <= FP32


@every_member
def test_a_regression_head_is_a_classifier_of_one_output(model_type, tmp_path):
    theirs = saved_oracle(tmp_path, model_type, "ForSequenceClassification", num_labels=1)
    model = read_model(tmp_path)
    batch = pack([[5, 6, 7]])
    with torch.no_grad():
        ours = model.network.scores("classify", model.network(batch), batch.layout)
        expected = theirs(input_ids=batch.tokens_T[None]).logits
    assert ours.shape == (1, 1) and (ours - expected).abs().max() <= FP32


HEADS = [
    ("ForMaskedLM", "mlm"),
    ("ForSequenceClassification", "classify"),
    ("ForTokenClassification", "tag"),
    ("ForQuestionAnswering", "span"),
    ("ForMultipleChoice", "choice"),
]
WITH_HEADS = [
    (model_type, *each)
    for each in HEADS
    for model_type in TRANSFORMERS
    if each[1] in ARCHITECTURES[model_type].heads
]
PRETRAINING = [("bert", "nsp"), ("ernie", "nsp"), ("albert", "sop")]


@pytest.mark.parametrize(("model_type", "kind", "head"), WITH_HEADS)
def test_every_head_scores_as_in_transformers(model_type, kind, head, tmp_path):
    labels = {} if head in ("mlm", "span", "choice") else {"num_labels": 5}
    theirs = saved_oracle(tmp_path, model_type, kind, **labels)
    network = read_model(tmp_path).network
    ids, segments = pairs_of([7, 2, 40])
    batch = pack(ids, segments)
    with torch.no_grad():
        hidden = network(batch)
        ours = scores(network, head, hidden, batch)
    for number, (text, segment) in enumerate(zip(ids, segments, strict=True)):
        assert (ours[number] - expected_scores(theirs, model_type, head, text, segment)).abs().max() <= FP32


def scores(network, head: str, hidden: torch.Tensor, batch: PackedBatch) -> list[torch.Tensor]:
    if head == "mlm":
        return unpack(network.scores_of_words(hidden), batch.layout)
    found = network.scores(head, hidden, batch.layout)
    return unpack(found, batch.layout) if head in ("tag", "span") else list(found)


def expected_scores(model, model_type: str, head: str, text: list[int], segment: list[int]) -> torch.Tensor:
    if head == "choice":
        inputs = {"input_ids": torch.tensor([[text]])}
        if model_type not in WITHOUT_SEGMENTS:
            inputs["token_type_ids"] = torch.tensor([[segment]])
        with torch.no_grad():
            return model(**inputs).logits[0]
    output = oracle_output(model, model_type, text, segment)
    if head == "span":
        return torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1)
    return output.logits[0]


@pytest.mark.parametrize(("model_type", "head"), PRETRAINING)
def test_both_pretraining_heads_score_as_in_transformers(model_type, head, tmp_path):
    theirs = saved_oracle(tmp_path, model_type, "ForPreTraining")
    network = read_model(tmp_path).network
    ids, segments = pairs_of([7, 2, 40])
    batch = pack(ids, segments)
    with torch.no_grad():
        hidden = network(batch)
        words, relation = scores(network, "mlm", hidden, batch), network.scores(head, hidden, batch.layout)
    for number, (text, segment) in enumerate(zip(ids, segments, strict=True)):
        expected = oracle_output(theirs, model_type, text, segment)
        order = expected.seq_relationship_logits if head == "nsp" else expected.sop_logits
        assert (words[number] - expected.prediction_logits[0]).abs().max() <= FP32
        assert (relation[number] - order[0]).abs().max() <= FP32


def test_electras_discriminator_scores_as_in_transformers(tmp_path):
    theirs = saved_oracle(tmp_path, "electra", "ForPreTraining")
    network = read_model(tmp_path).network
    batch = pack([[5, 6, 7, 8]])
    with torch.no_grad():
        ours = network.scores("replaced", network(batch), batch.layout)
        expected = theirs(input_ids=batch.tokens_T[None]).logits
    assert (ours[:, 0] - expected[0]).abs().max() <= FP32


def test_ernies_task_types_are_added_as_in_transformers(tmp_path):
    theirs = saved_oracle(tmp_path, "ernie", "Model")
    network = read_model(tmp_path).network
    ids, types = [5, 6, 7, 8], torch.tensor([0, 1, 2, 2])
    batch = pack([ids])
    batch = PackedBatch(batch.tokens_T, batch.segments_T, batch.positions_T, batch.layout, types)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), task_type_ids=types[None]).last_hidden_state[0]
        assert (network(batch) - expected).abs().max() <= FP32
        assert (network(pack([ids])) - expected).abs().max() > 1e-2


def test_modernberts_mean_pooling_reads_every_row(tmp_path):
    theirs = saved_oracle(
        tmp_path, "modernbert", "ForSequenceClassification", classifier_pooling="mean", num_labels=3
    )
    network = read_model(tmp_path).network
    ids, _ = pairs_of([7, 30])
    batch = pack(ids)
    with torch.no_grad():
        ours = network.scores("classify", network(batch), batch.layout)
        for number, text in enumerate(ids):
            assert (ours[number] - theirs(input_ids=torch.tensor([text])).logits[0]).abs().max() <= FP32


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "gelu_pytorch_tanh"])
def test_each_activation_is_the_one_of_its_name(activation, tmp_path):
    theirs = saved_oracle(tmp_path, "bert", "Model", hidden_act=activation)
    network = read_model(tmp_path).network
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0]
        assert (network(pack([[5, 6, 7]])) - expected).abs().max() <= FP32


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 0.5])
@pytest.mark.parametrize(("model_type", "key"), [("bert", "layer_norm_eps"), ("modernbert", "norm_eps")])
def test_the_epsilon_of_the_norms_is_the_one_in_the_config(model_type, key, eps, tmp_path):
    theirs = saved_oracle(tmp_path, model_type, "ForMaskedLM", **{key: eps})
    network = read_model(tmp_path).network
    batch = pack([[5, 6, 7]])
    with torch.no_grad():
        expected = theirs(input_ids=batch.tokens_T[None]).logits[0]
        assert (network.word_scores(network(batch), torch.arange(3)) - expected).abs().max() <= FP32


@pytest.mark.parametrize(("layers", "groups", "inner"), [(5, 2, 1), (4, 2, 2), (18, 14, 1)])
def test_albert_shares_blocks_by_groups_as_in_transformers(layers, groups, inner, tmp_path):
    sizes = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    theirs = saved_oracle(tmp_path, "albert", "Model", **sizes)
    network = read_model(tmp_path).network
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0]
        assert (network(pack([[5, 6, 7]])) - expected).abs().max() <= FP32
    assert len(network.encoder.blocks) == groups * inner


def test_the_oracles_cover_the_whole_family():
    assert set(CLASSES) == set(TRANSFORMERS)

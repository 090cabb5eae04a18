"""Published TensorFlow checkpoints arrive under the names, and with the values, that transformers has."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertForPreTraining,
    AlbertForQuestionAnswering,
    AlbertForSequenceClassification,
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    PreTrainedModel,
)

from bertsmith.core.errors import UserError
from bertsmith.interchange.tensorflow import import_checkpoint, read_checkpoint
from bertsmith.model.folder.model_folder import read_model
from bertsmith.packed import pack
from bertsmith.text.tokenizer import Tokenizer
from tests.bundle_writer import bfloat16, write_bundle
from tests.sentencepiece_writer import CONTROL, NORMAL, UNKNOWN, write_sentencepiece

SIZES = {
    "vocab_size": 11,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 7,
    "type_vocab_size": 2,
}
BERT = SIZES | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ALBERT = SIZES | {"hidden_act": "gelu", "embedding_size": 3, "num_hidden_groups": 2, "inner_group_num": 2}

# What turns a name of transformers into one of Google's, in this order.
BERT_NAMES = (
    ("qa_outputs.", "cls/squad/output_"),
    ("cls.predictions.bias", "cls/predictions/output_bias"),
    ("seq_relationship.", "seq_relationship/output_"),
    ("layer.", "layer_"),
    ("embeddings.weight", "embeddings"),
)
ALBERT_NAMES = (
    ("qa_outputs.", "cls/squad/output_"),
    ("sop_classifier.classifier.", "cls/seq_relationship/output_"),
    ("predictions.bias", "cls/predictions/output_bias"),
    ("predictions.dense", "cls/predictions/transform/dense"),
    ("predictions.LayerNorm", "cls/predictions/transform/LayerNorm"),
    ("albert.pooler", "bert/pooler/dense"),
    ("albert.", "bert."),
    ("albert_layer_groups.", "transformer/group_"),
    ("albert_layers.", "inner_group_"),
    ("attention.LayerNorm", "LayerNorm"),
    ("full_layer_layer_norm", "LayerNorm_1"),
    ("attention.dense", "attention_1/output/dense"),
    ("attention.", "attention_1/self/"),
    ("ffn_output", "ffn_1/intermediate/output/dense"),
    ("ffn.", "ffn_1/intermediate/dense."),
    ("embeddings.weight", "embeddings"),
)
HEADS = (("classifier.", "output_"), ("output_weight", "output_weights"))
LEAVES = (
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
    ("LayerNorm_1.weight", "LayerNorm_1.gamma"),
    ("LayerNorm_1.bias", "LayerNorm_1.beta"),
    (".weight", ".kernel"),
    (".", "/"),
)


def google_name(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for theirs, googles in (*rules, *HEADS, *LEAVES):
        name = name.replace(theirs, googles)
    return name


def google_variables(
    tensors: dict[str, torch.Tensor], rules: tuple[tuple[str, str], ...]
) -> dict[str, np.ndarray]:
    named = {google_name(name, rules): tensor.numpy() for name, tensor in tensors.items()}
    return {name: array.T.copy() if name.endswith("/kernel") else array for name, array in named.items()}


def random_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A random value for each tensor, also for those that start as ones or zeros, but none for tied ones."""
    names = {name: tensor for name, tensor in model.state_dict().items() if "decoder" not in name}
    return {name: torch.randn_like(tensor) for name, tensor in names.items()}


def write_checkpoint(folder: Path, config: dict[str, object], variables: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "albert" if "embedding_size" in config else "bert"
    (folder / f"{name}_config.json").write_text(json.dumps(config))
    write_bundle(folder / "bert_model.ckpt", variables)
    return folder


def bert_variables(*, model_class: type[PreTrainedModel] = BertForPreTraining) -> dict[str, np.ndarray]:
    return google_variables(random_tensors(model_class(BertConfig(**BERT))), BERT_NAMES)


def albert_variables(*, model_class: type[PreTrainedModel] = AlbertForPreTraining) -> dict[str, np.ndarray]:
    return google_variables(random_tensors(model_class(AlbertConfig(**ALBERT))), ALBERT_NAMES)


@pytest.mark.parametrize(
    "model_class", [BertForPreTraining, BertForQuestionAnswering, BertForSequenceClassification]
)
def test_a_bert_arrives_exactly_as_transformers_has_it(
    tmp_path: Path, model_class: type[PreTrainedModel]
) -> None:
    tensors = random_tensors(model_class(BertConfig(**BERT)))
    write_checkpoint(tmp_path, BERT, google_variables(tensors, BERT_NAMES))
    assert_arrives(tmp_path, tensors, model_class)


@pytest.mark.parametrize(
    "model_class", [AlbertForPreTraining, AlbertForQuestionAnswering, AlbertForSequenceClassification]
)
def test_an_albert_arrives_exactly_as_transformers_has_it(
    tmp_path: Path, model_class: type[PreTrainedModel]
) -> None:
    tensors = random_tensors(model_class(AlbertConfig(**ALBERT)))
    write_checkpoint(tmp_path, ALBERT, google_variables(tensors, ALBERT_NAMES))
    assert_arrives(tmp_path, tensors, model_class)


def assert_arrives(
    folder: Path, tensors: dict[str, torch.Tensor], model_class: type[PreTrainedModel]
) -> None:
    checkpoint = read_checkpoint(folder)
    assert checkpoint.skipped == checkpoint.unknown == ()
    assert checkpoint.config["architectures"] == [model_class.__name__]
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensors[name], tensor), name
        assert checkpoint.tensors[name].is_contiguous()
    model = model_class(model_class.config_class.from_dict(checkpoint.config))
    tied = {name: tensor for name, tensor in model.state_dict().items() if "decoder" in name}
    model.load_state_dict(checkpoint.tensors | tied, strict=True)


def test_the_names_written_here_are_the_published_ones() -> None:
    layer, group = "bert/encoder/layer_1", "bert/encoder/transformer/group_0/inner_group_0"
    assert bert_variables().keys() >= {
        "bert/embeddings/word_embeddings",
        "bert/embeddings/token_type_embeddings",
        "bert/embeddings/LayerNorm/gamma",
        f"{layer}/attention/self/query/kernel",
        f"{layer}/attention/output/dense/bias",
        f"{layer}/attention/output/LayerNorm/beta",
        f"{layer}/intermediate/dense/kernel",
        f"{layer}/output/dense/kernel",
        f"{layer}/output/LayerNorm/gamma",
        "bert/pooler/dense/kernel",
        "cls/predictions/transform/dense/kernel",
        "cls/predictions/transform/LayerNorm/beta",
        "cls/predictions/output_bias",
        "cls/seq_relationship/output_weights",
        "cls/seq_relationship/output_bias",
    }
    assert albert_variables().keys() >= {
        "bert/embeddings/position_embeddings",
        "bert/encoder/embedding_hidden_mapping_in/kernel",
        f"{group}/attention_1/self/value/bias",
        f"{group}/attention_1/output/dense/kernel",
        f"{group}/ffn_1/intermediate/dense/kernel",
        f"{group}/ffn_1/intermediate/output/dense/kernel",
        f"{group}/LayerNorm/gamma",
        f"{group}/LayerNorm_1/beta",
        "bert/pooler/dense/kernel",
        "cls/predictions/transform/LayerNorm/gamma",
        "cls/predictions/output_bias",
        "cls/seq_relationship/output_weights",
    }
    assert bert_variables(model_class=BertForQuestionAnswering).keys() >= {"cls/squad/output_weights"}
    assert albert_variables(model_class=AlbertForSequenceClassification).keys() >= {
        "output_weights",
        "output_bias",
    }


# --- a BERT with narrow embeddings: BERT's layers behind ALBERT's widening ---

FACTORISED = BERT | {"embedding_size": 3}


def factorised_variables() -> dict[str, np.ndarray]:
    """BERT's variables, with tables and masked-LM transform of another width and the layer between them."""
    rng = np.random.default_rng(3)
    variables = dict(bert_variables())
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        rows = len(variables[f"bert/embeddings/{name}"])
        variables[f"bert/embeddings/{name}"] = rng.normal(size=(rows, 3)).astype(np.float32)
    for part in ("bert/embeddings/LayerNorm", "cls/predictions/transform/LayerNorm"):
        for leaf in ("gamma", "beta"):
            variables[f"{part}/{leaf}"] = rng.normal(size=3).astype(np.float32)
    for name, shape in {
        "bert/encoder/embedding_hidden_mapping_in/kernel": (3, 4),
        "bert/encoder/embedding_hidden_mapping_in/bias": (4,),
        "cls/predictions/transform/dense/kernel": (4, 3),
        "cls/predictions/transform/dense/bias": (3,),
    }.items():
        variables[name] = rng.normal(size=shape).astype(np.float32)
    return variables


def factorised_reference(
    variables: dict[str, np.ndarray], ids: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Last states, pooled output and word scores of one text, written out plainly."""
    held = {name: array.astype(np.float64) for name, array in variables.items()}

    def dense(values, name):
        return values @ held[f"{name}/kernel"] + held[f"{name}/bias"]

    def norm(values, name):
        centred = values - values.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * held[f"{name}/gamma"] + held[f"{name}/beta"]

    def gelu(values):
        return 0.5 * values * (1 + np.vectorize(math.erf)(values / math.sqrt(2)))

    tables = [held[f"bert/embeddings/{name}_embeddings"] for name in ("word", "position", "token_type")]
    summed = tables[0][ids] + tables[1][: len(ids)] + tables[2][0]
    states = dense(norm(summed, "bert/embeddings/LayerNorm"), "bert/encoder/embedding_hidden_mapping_in")
    for number in range(2):
        layer = f"bert/encoder/layer_{number}"
        query, key, value = (
            dense(states, f"{layer}/attention/self/{part}") for part in ("query", "key", "value")
        )
        mixed = []
        for head in (slice(0, 2), slice(2, 4)):
            raised = np.exp(query[:, head] @ key[:, head].T / math.sqrt(2))
            mixed.append(raised / raised.sum(-1, keepdims=True) @ value[:, head])
        attended = dense(np.concatenate(mixed, -1), f"{layer}/attention/output/dense")
        states = norm(states + attended, f"{layer}/attention/output/LayerNorm")
        inner = gelu(dense(states, f"{layer}/intermediate/dense"))
        states = norm(states + dense(inner, f"{layer}/output/dense"), f"{layer}/output/LayerNorm")
    pooled = np.tanh(dense(states[0], "bert/pooler/dense"))
    transformed = gelu(dense(states, "cls/predictions/transform/dense"))
    words = norm(transformed, "cls/predictions/transform/LayerNorm") @ tables[0].T
    return states, pooled, words + held["cls/predictions/output_bias"]


def test_a_factorised_bert_is_imported_as_an_albert_without_shared_layers(tmp_path: Path) -> None:
    variables = factorised_variables()
    folder = write_checkpoint(tmp_path / "source", FACTORISED, variables)
    report = import_checkpoint(folder, tmp_path / "out")
    assert report.architecture == "AlbertForMaskedLM"
    assert report.unknown == ("cls/seq_relationship/output_bias", "cls/seq_relationship/output_weights")
    ids = [5, 9, 1, 10, 2]
    states, pooled, words = factorised_reference(variables, ids)
    network, batch = read_model(tmp_path / "out").network, pack([ids])
    theirs = AlbertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    # Norms over three and four values make rounding errors larger.
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        hidden = network(batch)
        close(hidden, states)
        close(network.pooled(hidden, batch.layout)[0], pooled)
        close(network.word_scores(hidden, torch.arange(5)), words)
        close(theirs(torch.tensor([ids])).logits[0], words)


def test_an_import_that_fails_names_the_published_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, BERT | {"num_attention_heads": 3}, bert_variables())
    with pytest.raises(UserError, match=f"{folder}/bert_config.json: 3 attention heads do not divide"):
        import_checkpoint(folder, tmp_path / "out")
    folder = write_checkpoint(tmp_path, BERT | {"hidden_size": 6}, bert_variables())
    with pytest.raises(UserError, match="but bert_config.json requires"):
        import_checkpoint(folder, tmp_path / "out")


def test_training_state_is_skipped_and_strangers_are_reported(tmp_path: Path) -> None:
    kernel = "bert/pooler/dense/kernel"
    state = [
        f"{kernel}/adam_m",
        f"{kernel}/adam_v",
        f"{kernel}/lamb_m",
        f"{kernel}/AdamWeightDecayOptimizer_1",
        f"{kernel}/Adam",
        f"{kernel}/LAMBOptimizer",
        "beta1_power",
        "global_step",
    ]
    strangers = [
        "answer_class/dense_0/kernel",
        "bert/encoder/layer_0/adapter/kernel",
        "cls/predictions/kernel",
    ]
    extra = {name: np.zeros((), np.int64) for name in state + strangers}
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, BERT, bert_variables() | extra))
    assert checkpoint.skipped == tuple(sorted(state))
    assert checkpoint.unknown == tuple(sorted(strangers))


def test_the_scope_of_a_hub_module_is_ignored(tmp_path: Path) -> None:
    variables = {f"module/{name}": array for name, array in albert_variables().items()}
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, ALBERT, variables))
    assert checkpoint.unknown == ()
    assert checkpoint.config["architectures"] == ["AlbertForPreTraining"]


def test_two_variables_for_one_tensor_are_rejected(tmp_path: Path) -> None:
    bias = {"module/bert/pooler/dense/bias": np.zeros(4, np.float32)}
    with pytest.raises(UserError, match="both become 'bert.pooler.dense.bias'"):
        read_checkpoint(write_checkpoint(tmp_path, BERT, bert_variables() | bias))


@pytest.mark.parametrize(
    ("dropped", "architecture"),
    [
        ("cls/seq_relationship", "BertForMaskedLM"),
        ("cls/predictions", "BertForNextSentencePrediction"),
        ("cls/", "BertModel"),
    ],
)
def test_the_architecture_follows_from_the_heads(tmp_path: Path, dropped: str, architecture: str) -> None:
    variables = {name: array for name, array in bert_variables().items() if not name.startswith(dropped)}
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, BERT, variables))
    assert checkpoint.config["architectures"] == [architecture]


def test_a_classifier_has_as_many_labels_as_rows(tmp_path: Path) -> None:
    head = {"output_weights": np.ones((3, 4), np.float32), "output_bias": np.ones(3, np.float32)}
    config = read_checkpoint(write_checkpoint(tmp_path, BERT, bert_variables() | head)).config
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    assert config["label2id"] == {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2}
    assert BertConfig.from_dict(config).num_labels == 3


def test_gelu_is_the_form_the_weights_were_trained_with_unless_given(tmp_path: Path) -> None:
    bert = write_checkpoint(tmp_path / "bert", BERT, bert_variables())
    albert = write_checkpoint(tmp_path / "albert", ALBERT, albert_variables())
    relu = write_checkpoint(tmp_path / "relu", BERT | {"hidden_act": "relu"}, bert_variables())
    acts = {
        (folder.name, gelu): read_checkpoint(folder, gelu=gelu).config["hidden_act"]
        for folder in (bert, albert, relu)
        for gelu in ("published", "erf", "tanh")
    }
    assert acts == {
        ("bert", "published"): "gelu",
        ("bert", "erf"): "gelu",
        ("bert", "tanh"): "gelu_new",
        ("albert", "published"): "gelu_new",
        ("albert", "erf"): "gelu",
        ("albert", "tanh"): "gelu_new",
        ("relu", "published"): "relu",
        ("relu", "erf"): "relu",
        ("relu", "tanh"): "relu",
    }


def test_the_config_says_what_the_published_one_says(tmp_path: Path) -> None:
    config = read_checkpoint(
        write_checkpoint(tmp_path, BERT | {"directionality": "bidi"}, bert_variables())
    ).config
    assert config.items() >= BERT.items()
    assert config["model_type"] == "bert" and config["layer_norm_eps"] == 1e-12
    assert "directionality" not in config
    assert json.loads(json.dumps(config)) == config


def test_what_a_config_leaves_out_is_what_googles_code_takes(tmp_path: Path) -> None:
    bert = write_checkpoint(tmp_path / "bert", {"vocab_size": 11}, bert_variables())
    assert read_checkpoint(bert).config["type_vocab_size"] == 16
    albert = write_checkpoint(
        tmp_path / "albert", {"vocab_size": 11, "embedding_size": 3}, albert_variables()
    )
    assert read_checkpoint(albert).config["num_hidden_groups"] == 1


def test_any_float_type_becomes_float32(tmp_path: Path) -> None:
    exact = np.arange(4, dtype=np.float32)
    names = [f"bert/{part}/LayerNorm/gamma" for part in ("embeddings", "encoder/layer_0/output")]
    variables = {
        names[0]: exact.astype(np.float16),
        names[1]: exact.astype(np.float64),
        "bert/pooler/dense/bias": bfloat16(exact),
    }
    tensors = read_checkpoint(write_checkpoint(tmp_path, BERT, variables)).tensors
    assert len(tensors) == 3
    for tensor in tensors.values():
        assert tensor.dtype == torch.float32 and tensor.tolist() == [0, 1, 2, 3]


def test_a_missing_layer_is_left_to_whoever_builds_the_model(tmp_path: Path) -> None:
    variables = {name: array for name, array in bert_variables().items() if "layer_1" not in name}
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, BERT, variables))
    assert not any("layer.1" in name for name in checkpoint.tensors)
    assert checkpoint.config["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    "name", ["bert/pooler/dense/kernel", "output_weights", "bert/embeddings/word_embeddings"]
)
@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 2), (1 << 40, 0)])
def test_a_matrix_that_is_none_is_rejected(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    variables = {name: np.zeros(shape, np.float32)}
    with pytest.raises(UserError, match=f"'{name}' has the shape .* not a matrix"):
        read_checkpoint(write_checkpoint(tmp_path, BERT, variables))


def test_a_checkpoint_of_something_else_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="does not contain variables of BERT or ALBERT, only .*electra/pooler"
    ):
        read_checkpoint(write_checkpoint(tmp_path, BERT, {"electra/pooler": np.zeros(1)}))


def test_a_checkpoint_is_found_by_folder_by_prefix_and_by_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, BERT, bert_variables())
    (folder / "._bert_model.ckpt.index").write_text("what macOS leaves in archives")
    for source in (folder, folder / "bert_model.ckpt", folder / "bert_model.ckpt.index"):
        assert "bert.pooler.dense.bias" in read_checkpoint(source).tensors


def test_several_checkpoints_in_a_folder_must_be_distinguished(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, BERT, bert_variables())
    write_bundle(folder / "model.ckpt-best", bert_variables())
    with pytest.raises(UserError, match="several checkpoints: bert_model.ckpt, model.ckpt-best; name one"):
        read_checkpoint(folder)
    assert "bert.pooler.dense.bias" in read_checkpoint(folder / "model.ckpt-best").tensors


def test_a_folder_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere" / "x.ckpt"):
        with pytest.raises(
            UserError, match=f"{source}: does not contain a TensorFlow checkpoint; give a folder"
        ):
            read_checkpoint(source)


def test_exactly_one_config_is_needed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, BERT, bert_variables())
    (folder / "bert_config.json").rename(folder / "my_config.json")
    assert read_checkpoint(folder).config["vocab_size"] == 11
    (folder / "other_config.json").write_text("{}")
    with pytest.raises(UserError, match="contains 2 config files instead of one; put"):
        read_checkpoint(folder)
    (folder / "bert_config.json").write_text("{}")
    with pytest.raises(UserError, match='bert_config.json: is not a BERT config: it lacks "vocab_size"'):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["vocab.txt", "30k-clean.model", "30k-clean.vocab"])
def test_the_vocabulary_beside_the_checkpoint_is_found(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, BERT, bert_variables())
    assert read_checkpoint(folder).vocabulary is None
    (folder / name).write_text("[PAD]\n")
    assert read_checkpoint(folder).vocabulary == folder / name


def test_alberts_sentencepiece_model_is_imported_with_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", ALBERT, albert_variables())
    first = [
        ("<pad>", CONTROL),
        ("<unk>", UNKNOWN),
        ("[CLS]", CONTROL),
        ("[SEP]", CONTROL),
        ("[MASK]", CONTROL),
    ]
    pieces = [(text, 0.0, kind) for text, kind in first] + [(text, -1.0, NORMAL) for text in ("▁", *"abcde")]
    write_sentencepiece(folder / "30k-clean.model", pieces, unknown_id=1)
    assert import_checkpoint(folder, tmp_path / "out").with_tokenizer
    assert Tokenizer.load(tmp_path / "out").encode("Ab").ids == [2, 5, 6, 7, 3]

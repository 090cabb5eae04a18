"""BERT and ALBERT checkpoints of TensorFlow 1, with Hugging Face's names for their tensors."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json
from bertsmith.core.progress import progress_bar
from bertsmith.inference.loaded_model import Bert, check_vocabulary
from bertsmith.interchange.bundle import Bundle
from bertsmith.model.folder.model_folder import model_from_tensors, write_model
from bertsmith.text.tokenizer import Tokenizer

Gelu = Literal["published", "erf", "tanh"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint: a Hugging Face config, float32 tensors, and the names of unused variables."""

    config: dict[str, Any]
    config_file: Path
    """The published config that `config` is based on."""
    tensors: dict[str, Tensor]
    vocabulary: Path | None
    skipped: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import, with the variables that it left out."""

    out: Path
    architecture: str
    parameters: int
    with_tokenizer: bool
    skipped: tuple[str, ...]
    unknown: tuple[str, ...]


def import_checkpoint(source: Path, out: Path, *, gelu: Gelu = "published") -> ImportReport:
    """Convert a TensorFlow 1 checkpoint into a model folder, with its tokenizer if it has one."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("already exists", where=str(out), remedy="name a new folder to write to")
    checkpoint = read_checkpoint(source, gelu=gelu)
    model = model_from_tensors(
        checkpoint.config, checkpoint.tensors.items(), where=source, config_file=checkpoint.config_file
    )
    with_tokenizer = checkpoint.vocabulary is not None and checkpoint.vocabulary.name in READ_VOCABULARIES
    if with_tokenizer:
        tokenizer = Tokenizer.load(source if source.is_dir() else source.parent)
        check_vocabulary(model, tokenizer, where=str(source))
        Bert(model, tokenizer, device="cpu").save(out)
    else:
        write_model(out, model)
    parameters = sum(parameter.numel() for parameter in model.network.parameters())
    return ImportReport(
        out,
        architecture=checkpoint.config["architectures"][0],
        parameters=parameters,
        with_tokenizer=with_tokenizer,
        skipped=checkpoint.skipped,
        unknown=checkpoint.unknown,
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """The differences between BERT, ALBERT and the models between them."""

    names: dict[str, str]  # pattern of a TensorFlow variable -> the Hugging Face tensor it becomes
    architectures: dict[str, tuple[str, ...]]  # class -> the tensors that show it, richest class first
    defaults: dict[str, Any]  # Google's defaults for keys that a config leaves out
    constants: dict[str, Any]  # fixed in Google's code, but required by Hugging Face
    published_gelu: str


_DENSE = "(kernel|bias)"
_NORM = "(gamma|beta)"
_HEAD = "output_(weights|bias)"
_EMBEDDINGS = "bert/embeddings/(word_embeddings|position_embeddings|token_type_embeddings)"
_WIDENING = "embedding_hidden_mapping_in"
_LAYER = "bert/encoder/layer_([0-9]+)"
_GROUP = "bert/encoder/transformer/group_([0-9]+)/inner_group_([0-9]+)"
_HF_LAYER = r"bert.encoder.layer.\1"
_HF_GROUP = r"albert.encoder.albert_layer_groups.\1.albert_layers.\2"
_HF_OWN_GROUP = r"albert.encoder.albert_layer_groups.\1.albert_layers.0"

_BERT = _Family(
    names={
        _EMBEDDINGS: r"bert.embeddings.\1.weight",
        f"bert/embeddings/LayerNorm/{_NORM}": r"bert.embeddings.LayerNorm.\1",
        f"{_LAYER}/attention/self/(query|key|value)/{_DENSE}": rf"{_HF_LAYER}.attention.self.\2.\3",
        f"{_LAYER}/attention/output/dense/{_DENSE}": rf"{_HF_LAYER}.attention.output.dense.\2",
        f"{_LAYER}/attention/output/LayerNorm/{_NORM}": rf"{_HF_LAYER}.attention.output.LayerNorm.\2",
        f"{_LAYER}/(intermediate|output)/dense/{_DENSE}": rf"{_HF_LAYER}.\2.dense.\3",
        f"{_LAYER}/output/LayerNorm/{_NORM}": rf"{_HF_LAYER}.output.LayerNorm.\2",
        f"bert/pooler/dense/{_DENSE}": r"bert.pooler.dense.\1",
        f"cls/predictions/transform/dense/{_DENSE}": r"cls.predictions.transform.dense.\1",
        f"cls/predictions/transform/LayerNorm/{_NORM}": r"cls.predictions.transform.LayerNorm.\1",
        "cls/predictions/output_bias": "cls.predictions.bias",
        f"cls/seq_relationship/{_HEAD}": r"cls.seq_relationship.\1",
        f"cls/squad/{_HEAD}": r"qa_outputs.\1",
        _HEAD: r"classifier.\1",
    },
    architectures={
        "BertForQuestionAnswering": ("qa_outputs.weight",),
        "BertForSequenceClassification": ("classifier.weight",),
        "BertForPreTraining": ("cls.predictions.bias", "cls.seq_relationship.weight"),
        "BertForMaskedLM": ("cls.predictions.bias",),
        "BertForNextSentencePrediction": ("cls.seq_relationship.weight",),
        "BertModel": (),
    },
    defaults={
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 16,  # the released configs all set 2
        "initializer_range": 0.02,
    },
    constants={"model_type": "bert", "layer_norm_eps": 1e-12, "pad_token_id": 0},
    published_gelu="erf",
)

_ALBERT = _Family(
    names={
        _EMBEDDINGS: r"albert.embeddings.\1.weight",
        f"bert/embeddings/LayerNorm/{_NORM}": r"albert.embeddings.LayerNorm.\1",
        f"bert/encoder/({_WIDENING})/{_DENSE}": r"albert.encoder.\1.\2",
        f"{_GROUP}/attention_1/self/(query|key|value)/{_DENSE}": rf"{_HF_GROUP}.attention.\3.\4",
        f"{_GROUP}/attention_1/output/dense/{_DENSE}": rf"{_HF_GROUP}.attention.dense.\3",
        f"{_GROUP}/LayerNorm/{_NORM}": rf"{_HF_GROUP}.attention.LayerNorm.\3",
        f"{_GROUP}/ffn_1/intermediate/dense/{_DENSE}": rf"{_HF_GROUP}.ffn.\3",
        f"{_GROUP}/ffn_1/intermediate/output/dense/{_DENSE}": rf"{_HF_GROUP}.ffn_output.\3",
        f"{_GROUP}/LayerNorm_1/{_NORM}": rf"{_HF_GROUP}.full_layer_layer_norm.\3",
        f"bert/pooler/dense/{_DENSE}": r"albert.pooler.\1",
        f"cls/predictions/transform/dense/{_DENSE}": r"predictions.dense.\1",
        f"cls/predictions/transform/LayerNorm/{_NORM}": r"predictions.LayerNorm.\1",
        "cls/predictions/output_bias": "predictions.bias",
        f"cls/seq_relationship/{_HEAD}": r"sop_classifier.classifier.\1",
        f"cls/squad/{_HEAD}": r"qa_outputs.\1",
        _HEAD: r"classifier.\1",
    },
    architectures={
        "AlbertForQuestionAnswering": ("qa_outputs.weight",),
        "AlbertForSequenceClassification": ("classifier.weight",),
        "AlbertForPreTraining": ("predictions.bias", "sop_classifier.classifier.weight"),
        "AlbertForMaskedLM": ("predictions.bias",),
        "AlbertModel": (),
    },
    defaults={
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_hidden_layers": 12,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
    },
    constants={
        "model_type": "albert",
        "layer_norm_eps": 1e-12,
        "classifier_dropout_prob": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    published_gelu="tanh",
)

# BERT with ALBERT's narrow embeddings (SimBERT's small sizes and others): no two layers share a weight, so it
# is an ALBERT with as many groups as layers. A next-sentence head is left out: ALBERT's predicts the order.
_FACTORISED_BERT = _Family(
    names={
        _EMBEDDINGS: r"albert.embeddings.\1.weight",
        f"bert/embeddings/LayerNorm/{_NORM}": r"albert.embeddings.LayerNorm.\1",
        f"bert/encoder/({_WIDENING})/{_DENSE}": r"albert.encoder.\1.\2",
        f"{_LAYER}/attention/self/(query|key|value)/{_DENSE}": rf"{_HF_OWN_GROUP}.attention.\2.\3",
        f"{_LAYER}/attention/output/dense/{_DENSE}": rf"{_HF_OWN_GROUP}.attention.dense.\2",
        f"{_LAYER}/attention/output/LayerNorm/{_NORM}": rf"{_HF_OWN_GROUP}.attention.LayerNorm.\2",
        f"{_LAYER}/intermediate/dense/{_DENSE}": rf"{_HF_OWN_GROUP}.ffn.\2",
        f"{_LAYER}/output/dense/{_DENSE}": rf"{_HF_OWN_GROUP}.ffn_output.\2",
        f"{_LAYER}/output/LayerNorm/{_NORM}": rf"{_HF_OWN_GROUP}.full_layer_layer_norm.\2",
        f"bert/pooler/dense/{_DENSE}": r"albert.pooler.\1",
        f"cls/predictions/transform/dense/{_DENSE}": r"predictions.dense.\1",
        f"cls/predictions/transform/LayerNorm/{_NORM}": r"predictions.LayerNorm.\1",
        "cls/predictions/output_bias": "predictions.bias",
        f"cls/squad/{_HEAD}": r"qa_outputs.\1",
        _HEAD: r"classifier.\1",
    },
    architectures=_ALBERT.architectures,
    defaults=_BERT.defaults | {"embedding_size": 128, "inner_group_num": 1},
    constants={
        "model_type": "albert",
        "layer_norm_eps": 1e-12,
        "classifier_dropout_prob": 0.1,
        "pad_token_id": 0,
    },
    published_gelu="erf",
)

READ_VOCABULARIES = ("vocab.txt", "30k-clean.model")
_VOCABULARIES = ("vocab.txt", "vocab_chinese.txt", "30k-clean.model", "30k-clean.vocab")
_HF_GELU = {"erf": "gelu", "tanh": "gelu_new"}
_HF_LEAVES = {"kernel": "weight", "weights": "weight", "gamma": "weight", "beta": "bias"}
_MATRICES = ("/kernel", "output_weights", "_embeddings")
_HUB_SCOPE = "module/"  # prefix of each name in checkpoints that were exported from a TensorFlow Hub module
_TRAINING_STATE = re.compile(
    r"(^|/)(adam_[mv]|lamb_[mv]|(Adam|AdamWeightDecayOptimizer|LAMB|LAMBOptimizer)(_[0-9]+)?"
    r"|beta[12]_power(_[0-9]+)?|global_step|current_loss_scale|good_steps)($|/)"
)


def read_checkpoint(source: Path, *, gelu: Gelu = "published") -> Checkpoint:
    """Read the checkpoint in a folder, or at a prefix such as FOLDER/bert_model.ckpt.

    Google's code calls two functions "gelu": the erf form until February 2019, its tanh approximation since.
    "published" is the one used to train the released weights: erf for BERT, tanh for ALBERT.
    """
    prefix = _find_prefix(source)
    config_file, published = _read_config(prefix.parent)
    bundle = Bundle(prefix)
    # A checkpoint saved in training contains two moments of each weight, with a suffix after its name.
    skipped = tuple(name for name in bundle.names() if _TRAINING_STATE.search(name))
    family = _family_of(bundle)
    variables = _variables(family, sorted(set(bundle.names()) - set(skipped)), prefix)
    tensors = {}
    with progress_bar("reading variables", len(variables)) as advance:
        for target, name in variables.items():
            tensors[target] = _tensor(bundle, name, prefix)
            advance(1)
    unknown = sorted(set(bundle.names()) - set(skipped) - set(variables.values()))
    beside = (prefix.parent / name for name in _VOCABULARIES)
    vocabulary = next((path for path in beside if path.is_file()), None)
    config = _config(family, published, tensors, gelu)
    return Checkpoint(config, config_file, tensors, vocabulary, skipped, tuple(unknown))


def _family_of(bundle: Bundle) -> _Family:
    """Return the family with the names of these variables."""
    if any("/group_0/" in name for name in bundle.names()):
        return _ALBERT
    return _FACTORISED_BERT if any(f"/{_WIDENING}/" in name for name in bundle.names()) else _BERT


# The files.


def _find_prefix(source: Path) -> Path:
    """Return the common prefix of the names of a checkpoint's files."""
    candidates = source.glob("[!.]*.index") if source.is_dir() else (source, Path(f"{source}.index"))
    found = sorted(path for path in candidates if path.suffix == ".index" and path.is_file())
    if not found:
        remedy = "give a folder with bert_model.ckpt.index, or the prefix FOLDER/bert_model.ckpt"
        raise UserError("does not contain a TensorFlow checkpoint", where=str(source), remedy=remedy)
    if len(found) > 1:
        names = ", ".join(path.stem for path in found)
        remedy = f"name one, for example {found[0].with_suffix('')}"
        raise UserError(f"contains several checkpoints: {names}", where=str(source), remedy=remedy)
    return found[0].with_suffix("")


def _read_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the published config in a folder, and its file."""
    published = (folder / "bert_config.json", folder / "albert_config.json")
    found = [path for path in published if path.is_file()] or sorted(folder.glob("[!.]*config.json"))
    remedy = "put only the checkpoint's own bert_config.json or albert_config.json there"
    if len(found) != 1:
        raise UserError(
            f"contains {len(found)} config files instead of one", where=str(folder), remedy=remedy
        )
    config = read_json(found[0], remedy=remedy)
    if "vocab_size" not in config:
        raise UserError('is not a BERT config: it lacks "vocab_size"', where=str(found[0]), remedy=remedy)
    return found[0], config


# The variables.


def _variables(family: _Family, names: list[str], prefix: Path) -> dict[str, str]:
    """Return the TensorFlow variable for each Hugging Face tensor."""
    variables: dict[str, str] = {}
    for name in names:
        bare = name.removeprefix(_HUB_SCOPE)
        matches = ((re.fullmatch(pattern, bare), template) for pattern, template in family.names.items())
        expanded = next((match.expand(template) for match, template in matches if match), None)
        if expanded is None:
            continue
        module, _, leaf = expanded.rpartition(".")
        target = f"{module}.{_HF_LEAVES.get(leaf, leaf)}"
        if target in variables:
            what = f"{variables[target]!r} and {name!r} would both become {target!r}"
            raise UserError(what, where=str(prefix), remedy="save only one of them")
        variables[target] = name
    if not variables:
        remedy = "only checkpoints of Google's BERT and ALBERT code for TensorFlow 1 can be read"
        what = f"does not contain variables of BERT or ALBERT, only {names[:3]}"
        raise UserError(what, where=str(prefix), remedy=remedy)
    return variables


def _tensor(bundle: Bundle, name: str, prefix: Path) -> Tensor:
    """Return a variable as Hugging Face stores it: kernels [in, out] become weights [out, in]."""
    shape = bundle.shape(name)
    if name.endswith(_MATRICES) and (len(shape) != 2 or 0 in shape):
        remedy = "download the checkpoint again, or save it with Google's BERT code"
        what = f"{name!r} has the shape {shape}, which is not a matrix"
        raise UserError(what, where=str(prefix), remedy=remedy)
    tensor = torch.from_numpy(bundle.tensor(name).astype(np.float32, copy=False))
    return tensor.T.contiguous() if name.endswith("/kernel") else tensor


# The config.


def _config(
    family: _Family, published: dict[str, Any], tensors: dict[str, Tensor], gelu: Gelu
) -> dict[str, Any]:
    """Return the Hugging Face config that corresponds to the published one."""
    config = {key: published.get(key, default) for key, default in family.defaults.items()}
    config |= family.constants | {"vocab_size": published["vocab_size"]}
    if family is _FACTORISED_BERT:
        config["num_hidden_groups"] = config["num_hidden_layers"]
    if config["hidden_act"] == "gelu":
        config["hidden_act"] = _HF_GELU[family.published_gelu if gelu == "published" else gelu]
    # The richest class with heads that the checkpoint has; the bare model, which needs none, is last.
    fitting = (name for name, shown_by in family.architectures.items() if tensors.keys() >= set(shown_by))
    config["architectures"] = [next(fitting)]
    if "classifier.weight" in tensors:
        labels = [f"LABEL_{index}" for index in range(len(tensors["classifier.weight"]))]
        config["id2label"] = {str(index): label for index, label in enumerate(labels)}
        config["label2id"] = {label: index for index, label in enumerate(labels)}
    return config

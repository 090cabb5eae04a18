"""Model folders: a network from `config.json` and its weights under their published names, and back."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, read_json, write_json
from bertsmith.model.architecture import Architecture, Names, published_in
from bertsmith.model.architectures.registry import QUANTISED_TYPE, architecture_of
from bertsmith.model.encoder_config import ConfigReader, EncoderConfig
from bertsmith.model.folder.quantised_folder import (
    put_stored,
    quantised_config,
    real_config,
    stored_and_real,
    stored_tensors,
)
from bertsmith.model.folder.sentence_modules import SentenceModules, read_sentence_modules, transformer_folder
from bertsmith.model.folder.tensor_files import SAVED_WEIGHT_FILES, read_tensors, write_tensors
from bertsmith.model.heads import OutputHead, exact_outputs
from bertsmith.model.inference.quantised_weights import QuantisedLayer
from bertsmith.model.network import (
    Network,
    add_missing_supports,
    build_network,
    published_names,
)

SHOWN_NAMES = 8
SHORT_TYPES = (torch.bfloat16, torch.float16)
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OUTPUT_LAYER = re.compile(r"heads\.[^.]+\.output\.(weight|bias)")
"""Our names of a task's last layer."""
BUFFERS = ("position_ids", "token_type_ids", ".attn.bias", ".attn.masked_bias")
"""Constants that old files store among the weights."""
NORM_PARTS = {"gamma": "weight", "beta": "bias"}
"""TensorFlow's names for the parts of a LayerNorm, in files converted before 2019."""
PARALLEL_PREFIX = "module."
"""Prefix that torch's data-parallel wrappers add to every name."""
SHARD_BYTES = 5_000_000_000
NOT_KEPT = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "model_type", "num_labels"),
    *("_name_or_path", "auto_map"),
}
"""Keys of a config.json that describe the file, not the model, or refer to foreign code."""


# ---- tensors under their canonical names, and the heads they make


@dataclass(frozen=True, slots=True)
class CheckpointTensors:
    """The tensors of a file under the architecture's names, with its prefix."""

    tensors: dict[str, Tensor]
    architecture: Architecture[Any]
    config: EncoderConfig
    where: Path
    config_file: Path

    def names_of(self, head: str) -> set[str]:
        """Return the published names of a head."""
        return self.architecture.names_of_head(head, self.config)

    def heads(self, expected: Iterable[str]) -> dict[str, int]:
        """Return the heads in the file, with their numbers of outputs; expected ones must be complete."""
        found: dict[str, int] = {}
        for head in expected:
            if not self.names_of(head):  # a head without weights is known only from the class (GPT-2's words)
                found[head] = 0
            self._take(head, found)
            absent = self.names_of(head) - self.tensors.keys()
            # A missing pooler is not an error: some models never had one.
            if absent and (head != "pooler" or absent < self.names_of(head)):
                self.check_complete(self.names_of(head))
        # If heads share names (tagger, classifier), prefer the one whose dependencies are in the file.
        for head in sorted(self.architecture.heads, key=lambda head: not self._has_supports(head)):
            self._take(head, found)
        return found

    def check_complete(self, names: set[str]) -> None:
        """Raise if the file lacks some of these weights, listing them."""
        if missing := names - self.tensors.keys():
            remedy = "the file is incomplete or of another model"
            raise UserError(f"weights are missing: {_listed(missing)}", where=str(self.where), remedy=remedy)

    def unused(self, names: Names) -> str:
        """Return a list of unused tensors; empty if all are used."""
        left = self.tensors.keys() - published_in(names)
        return _listed({name for name in left if not name.endswith(BUFFERS)})

    def assembled(
        self, names: Names, expected: Mapping[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return our tensors, each from one or several published ones stacked; sizes are compared first."""
        for ours, theirs in names.items():
            part = [len(expected[ours]) // len(theirs), *expected[ours].shape[1:]]
            for name in theirs:
                actual, size = list(self.tensors[name].shape), self._as_published(name, part)
                if actual != size:
                    what = f"{name} is {actual}, but {self.config_file.name} requires {size}"
                    remedy = f"{self.config_file.name} and the weights belong to different models"
                    raise UserError(what, where=str(self.where), remedy=remedy)
        # Query, key and value are published as three weights and computed here by one product.
        assembled = {}
        for ours, theirs in names.items():
            wanted = exact_outputs(dtype) if OUTPUT_LAYER.fullmatch(ours) else dtype
            parts = [self._weights(name, wanted) for name in theirs]
            assembled[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
        return assembled

    def _as_published(self, name: str, size: list[int]) -> list[int]:
        return size[::-1] if self.architecture.transposed(name) else size

    def _has_supports(self, head: str) -> bool:
        supports = (self.names_of(support) for support in self.architecture.heads[head].needs)
        return all(names <= self.tensors.keys() for names in supports)

    def _take(self, head: str, found: dict[str, int]) -> None:
        names = self.names_of(head)
        taken = {name for other in found for name in self.names_of(other)}
        if head in found or not names or not names <= self.tensors.keys() or names & taken:
            return
        output = self.architecture.heads[head].names(self.config).get("output.weight")
        if output is None:
            found[head] = 0
            return
        matrix = self.tensors[output[0]]
        # Tensors of other dimensions are rejected later, by their size.
        found[head] = int(matrix.shape[0]) if matrix.dim() == 2 and len(matrix) else 1

    def _weights(self, name: str, dtype: torch.dtype) -> Tensor:
        held = self.tensors[name]
        if held.dtype not in WEIGHT_TYPES:
            what = f"{name} holds {held.dtype}, not numbers of 16, 32 or 64 bits"
            raise UserError(what, where=str(self.where), remedy="export it as float32")
        weights = (held.t().contiguous() if self.architecture.transposed(name) else held).to(dtype)
        if not weights.isfinite().all():
            what = f"{name} holds NaN or infinite values"
            raise UserError(what, where=str(self.where), remedy="use an earlier checkpoint")
        return weights


def canonical_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    architecture: Architecture[Any],
    config: EncoderConfig,
    *,
    where: Path,
    config_file: Path,
) -> CheckpointTensors:
    """Return the tensors with today's LayerNorm names, the prefix, and the first of two tied names."""
    held = dict(tensors)
    if held and all(name.startswith(PARALLEL_PREFIX) for name in held):
        held = {name.removeprefix(PARALLEL_PREFIX): tensor for name, tensor in held.items()}
    # A file of the bare encoder has its names, and the pooler's, without the prefix.
    in_bare = published_in(architecture.encoder_names(config))
    if "pooler" in architecture.heads:
        in_bare |= architecture.names_of_head("pooler", config)
    bare = {name.removeprefix(architecture.prefix) for name in in_bare}
    words, decoder = architecture.words_name(config), architecture.decoder_name(config)
    table = held.get(words, held.get(words.removeprefix(architecture.prefix)))
    # A decoder that differs from the embeddings, or is meant to, is not their second name. Then its own bias
    # counts, and the other name of that bias is a leftover.
    untied = decoder in held and table is not None and not (config.tied and _same(held[decoder], table))
    decoder_bias = decoder.removesuffix("weight") + "bias"
    if untied and decoder_bias in held:
        held.pop(architecture.tied.get(decoder_bias, ""), None)
    renamed: dict[str, Tensor] = {}
    for name, tensor in held.items():
        modern = re.sub(r"LayerNorm\.(gamma|beta)$", lambda match: "LayerNorm." + NORM_PARTS[match[1]], name)
        # A file may contain tied weights twice: they become one, and must be equal.
        prefixed = architecture.prefix + modern if modern in bare else modern
        first = prefixed if untied and prefixed == decoder else architecture.tied.get(prefixed, prefixed)
        if first in renamed and not _same(renamed[first], tensor):
            what = f"{name} differs from {first}, which should be the same weight"
            raise UserError(what, where=str(where), remedy="models that do not tie them are not supported")
        renamed[first] = tensor
    return CheckpointTensors(renamed, architecture, config, where, config_file)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:SHOWN_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


@dataclass(frozen=True, slots=True)
class Model:
    """A network as read from a model folder."""

    network: Network
    extras: dict[str, Any] = field(default_factory=dict)
    """Other keys of config.json, labels included; written back unchanged."""
    notes: tuple[str, ...] = ()
    """Notes for the user: unused weights, a missing pooler."""
    untrained: tuple[str, ...] = ()
    """Heads that the folder lacked and that were freshly initialised."""
    sentence: SentenceModules = SentenceModules()
    """Modules that make vectors of texts."""
    stored: torch.dtype = torch.float32
    """Type of the weights in their file, without the last layers of tasks, if all have one type; written back
    if none has changed.
    """

    def labels(self) -> tuple[str, ...]:
        """Return the names of a task head's outputs, in order."""
        by_number = self.extras.get("id2label") or {}
        return tuple(str(by_number[number]) for number in sorted(by_number, key=int))


def read_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """Read the network of a Hugging Face model folder, ours or anyone's."""
    if not folder.is_dir():
        raise UserError("is not a folder", where=str(folder), remedy="give the folder with config.json")
    remedy = "a model folder contains config.json, weights and tokenizer files"
    inner = transformer_folder(folder)
    config_json, tensors = read_json(inner / "config.json", remedy=remedy), read_tensors(inner)
    stored = None
    if config_json.get("model_type") == QUANTISED_TYPE:
        config_json = real_config(config_json, where=inner)
        transposed = architecture_of(ConfigReader(config_json, str(inner)).model_type).transposed
        stored, real = stored_and_real(tensors, transposed, where=inner)
        tensors = iter(real.items())
    model = model_from_tensors(config_json, tensors, where=inner, dtype=dtype)
    if stored is not None:
        put_stored(model.network, stored)
        model.network.encoder.to(dtype)
    return replace(model, sentence=read_sentence_modules(folder))


def model_from_tensors(
    config_json: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    where: Path,
    config_file: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Build the network from a config.json's contents and tensors under their published names.

    `config_file` is the file to name in errors if the contents are not from the folder's config.json.
    """
    config_file = config_file or where / "config.json"
    reader = ConfigReader(config_json, str(config_file))
    if config_json.get("model_type") is None:
        remedy = 'add "model_type": "bert", or its own type'
        raise UserError("lacks a model_type", where=reader.where, remedy=remedy)
    architecture = architecture_of(reader.model_type, where=reader.where)
    ties = reader.switch("tie_word_embeddings", True)
    config = replace(read_config(reader), tied=ties)
    checkpoint = canonical_tensors(tensors, architecture, config, where=where, config_file=config_file)
    # A tagger and a classifier have the same published names: the class in config.json decides.
    expected = [head for name in reader.texts("architectures") for head in architecture.classes.get(name, ())]
    heads = checkpoint.heads(expected)
    has_own_decoder = architecture.decoder_name(config) in checkpoint.tensors
    config = replace(config, tied="mlm" not in heads or (ties and not has_own_decoder))
    names = published_names(config, heads)
    checkpoint.check_complete(published_in(names))
    # On the meta device a network takes no memory: the sizes are compared before any is allocated.
    with torch.device("meta"), _NothingInitialised():
        network = build_network(config, heads)
    stored = {checkpoint.tensors[name].dtype for name in published_in(names) - _output_names(names)}
    assembled = checkpoint.assembled(names, network.state_dict(), dtype)
    network.load_state_dict(assembled, assign=True)
    _check_shared(network, assembled, where=where)
    _check_settings(reader, architecture, heads)
    fresh = add_missing_supports(network, torch.Generator().manual_seed(0))
    extras = {key: value for key, value in reader.rest().items() if key not in NOT_KEPT}
    notes = []
    if ties and not config.tied:
        notes.append(
            "the decoder of masked words differs from the word embeddings, though tie_word_embeddings is not"
            " false: both are kept unchanged"
        )
    if unused := checkpoint.unused(names):
        notes.append(
            f"weights that do not belong to any part of {architecture.model_type} were skipped: {unused}"
        )
    if fresh:
        notes.append(f"not in the folder and freshly initialised, so train before use: {', '.join(fresh)}")
    one_type = stored.pop() if len(stored) == 1 else torch.float32
    return Model(network.eval(), extras, tuple(notes), tuple(fresh), stored=one_type)


def write_model(folder: Path, model: Model, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Store a network so that `read_model` and transformers open it.

    Weights from a file in 16 bits are written in 16 bits if that loses nothing. A new folder appears whole or
    not at all; in an existing one, weights are replaced before config.json.
    """
    network = model.network
    config, heads = network.config, head_outputs(network)
    architecture = architecture_of(config.model_type)
    for one, other in combinations(sorted(heads), 2):
        if architecture.names_of_head(one, config) & architecture.names_of_head(other, config):
            what = f"the heads {one} and {other} of {architecture.model_type} have the same published names"
            raise UserError(what, remedy="remove one of them and save again")
    names = published_names(config, heads)
    tensors = _published_tensors(network, names)
    if "mlm" in heads and not config.tied:  # readers then do not tie the biases either
        bias = architecture.decoder_name(config).removesuffix("weight") + "bias"
        if first := architecture.tied.get(bias):
            tensors[bias] = tensors[first].clone()
    # the prefix distinguishes an encoder from its heads
    if _classes_of(network) == [_bare_class(architecture)]:
        tensors = {name.removeprefix(architecture.prefix): tensor for name, tensor in tensors.items()}
    config_json = published_config(model)
    _check_read_back(config_json, config)
    short = {name: tensor for name, tensor in tensors.items() if name not in _output_names(names)}
    if model.stored in SHORT_TYPES and all(_fits(tensor, model.stored) for tensor in short.values()):
        tensors |= {name: tensor.to(model.stored) for name, tensor in short.items()}
        config_json["dtype"] = str(model.stored).removeprefix("torch.")
    with atomic_folder(folder, replaces=SAVED_WEIGHT_FILES) as fresh:
        write_json(fresh / "config.json", quantised_config(config_json, network))
        write_tensors(fresh, tensors, shard_bytes)
        model.sentence.write(fresh)


def _check_read_back(config_json: Mapping[str, Any], config: EncoderConfig) -> None:
    """Raise if the config.json to be written would be read as another model's."""
    read = read_config(ConfigReader(config_json, "config.json"))
    for name, value in vars(config).items():
        if name != "tied" and (found := vars(read).get(name)) != value:
            what = f"config.json of a {config.model_type} model cannot express {name} = {value}, only {found}"
            raise UserError(what, remedy="train it as a model of another type")


def _output_names(names: Names) -> set[str]:
    """Return the published names of tasks' last layers, which are exact in any precision."""
    return {name for ours, theirs in names.items() if OUTPUT_LAYER.fullmatch(ours) for name in theirs}


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if a tensor is the same in a shorter type; False for whole numbers."""
    return tensor.is_floating_point() and torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def published_config(model: Model) -> dict[str, Any]:
    """Return the config.json of a model with plain or quantised weights."""
    config, heads = model.network.config, head_outputs(model.network)
    architecture, classes = architecture_of(config.model_type), _classes_of(model.network)
    return {
        **model.extras,
        **_label_keys(model, architecture, heads),
        **architecture.write_config(config),
        **config.own_keys(),
        **({} if config.tied else {"tie_word_embeddings": False}),
        "dtype": str(next(model.network.parameters()).dtype).removeprefix("torch."),
        "architectures": [architecture.causal_classes.get(name, name) for name in classes]
        if config.direction == "left-to-right"
        else classes,
    }


def _published_tensors(network: Network, names: Names) -> dict[str, Tensor]:
    """Return the weights of a network under their published names, quantised ones with their scales."""
    ours, tensors = network.state_dict(), dict[str, Tensor]()
    transposed = architecture_of(network.config.model_type).transposed
    quantised = {
        f"{name}.weight": layer
        for name, layer in network.named_modules(remove_duplicate=False)
        if isinstance(layer, QuantisedLayer)
    }
    for name, theirs in names.items():
        if name in quantised:
            tensors |= stored_tensors(quantised[name], theirs)
            continue
        # Clones: a file must not store one memory twice, nor the rest of a view's memory.
        parts = ours[name].detach().cpu().contiguous().chunk(len(theirs))
        for each, part in zip(theirs, parts, strict=True):
            tensors[each] = (part.t() if transposed(each) else part).clone(
                memory_format=torch.contiguous_format
            )
    return tensors


def head_outputs(network: Network) -> dict[str, int]:
    """Return the heads of a network and the number of their outputs (0 without an output layer)."""
    return {
        name: head.output.out_features if isinstance(head, OutputHead) else 0
        for name, head in network.heads.items()
    }


def _labelled_outputs(architecture: Architecture[Any], heads: Mapping[str, int]) -> int:
    """Return the number of outputs with names in config.json: those of the only head with labels, or 0."""
    # In the architecture's order, because the order of a network's heads depends on their history.
    labelled = (heads[head] for head, spec in architecture.heads.items() if head in heads and spec.labelled)
    return next(labelled, 0)


# ---- reading


class _NothingInitialised(TorchFunctionMode):
    """Modules without initial weights: sampling on the meta device would load torch's compiler."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        initialises = getattr(function, "__module__", "") == torch.nn.init.__name__
        return named["tensor"] if initialises else function(*args, **named)


def read_config(reader: ConfigReader) -> EncoderConfig:
    """Read the encoder config of a config.json, by the architecture that it names."""
    config: EncoderConfig = architecture_of(reader.model_type, where=reader.where).read_config(reader)
    return config.checked(reader)


def _check_shared(network: Network, assembled: Mapping[str, Tensor], *, where: Path) -> None:
    """Raise if layers that share a weight have different ones in the file."""
    for name, parameter in network.named_parameters(remove_duplicate=False):
        own = assembled[name]
        if own.data_ptr() != parameter.data_ptr() and not torch.equal(own, parameter):
            what = f"{name} differs from another layer's weight, but config.json declares them shared"
            remedy = "remove shared_parts from config.json to separate the layers"
            raise UserError(what, where=str(where), remedy=remedy)


def _check_settings(reader: ConfigReader, architecture: Architecture[Any], heads: Mapping[str, int]) -> None:
    """Raise at settings that do not fit the heads: another number of labels."""
    labels = reader.values.get("id2label") or {}
    if not isinstance(labels, dict) or not all(str(number).isdecimal() for number in labels):
        what = f"id2label is {labels!r}"
        raise UserError(what, where=reader.where, remedy='write it as {"0": "first label", ...}')
    outputs = _labelled_outputs(architecture, heads)
    if outputs and labels and len(labels) != outputs:
        what = f"id2label names {len(labels)} labels, but the head has {outputs} outputs"
        raise UserError(what, where=reader.where, remedy="name each output once")


# ---- writing


def _classes_of(network: Network) -> list[str]:
    """Return the published classes that together name the heads, the most decisive first."""
    config, heads = network.config, set(network.heads)
    architecture = architecture_of(config.model_type)
    names = {head: architecture.names_of_head(head, config) for head in architecture.heads}

    def rank(name: str) -> tuple[bool, int]:
        held = architecture.classes[name]
        doubtful = any(names[head] & names[other] for head in held for other in names if other != head)
        return (not doubtful, -len(held))

    chosen: list[str] = []
    left = set(heads)
    # A class may also name a missing pooler: readers initialise one, as for any such folder.
    fitting = [name for name, held in architecture.classes.items() if set(held) <= heads | {"pooler"}]
    for name in sorted(fitting, key=rank):
        if left & set(architecture.classes[name]) and not (chosen and name == _bare_class(architecture)):
            chosen.append(name)
            left -= set(architecture.classes[name])
    return chosen or [_bare_class(architecture)]


def _bare_class(architecture: Architecture[Any]) -> str:
    return min((name for name in architecture.classes if name.endswith("Model")), key=len)


def _label_keys(model: Model, architecture: Architecture[Any], heads: Mapping[str, int]) -> dict[str, Any]:
    """Return id2label and its inverse for a task head without labels: readers take its size from them."""
    outputs = _labelled_outputs(architecture, heads)
    if not outputs or len(model.labels()) == outputs:
        return {}
    labels = [f"LABEL_{number}" for number in range(outputs)]
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }

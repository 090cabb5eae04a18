"""Adapter folders in the format of peft: LoRA over a base model, and the heads trained with it.

`adapter_config.json` contains the settings, `adapter_model.safetensors` A and B of each layer and the whole
weights of the heads. Settings of peft that bertsmith does not support are refused; nothing is skipped.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.core.errors import UserError
from bertsmith.core.files import read_json, write_json
from bertsmith.inference.embedded_models import embedded_models
from bertsmith.inference.finetuned_folder import FinetunedTask
from bertsmith.inference.model_path import ADAPTER_CONFIG, is_adapter, model_folder
from bertsmith.model.architecture import Architecture
from bertsmith.model.architectures.registry import architecture_of
from bertsmith.model.folder.model_folder import CheckpointTensors, Model, head_outputs
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.folder.sentence_modules import transformer_folder
from bertsmith.model.folder.tensor_files import FOR_TORCH, read_metadata, read_safetensors, write_safetensors
from bertsmith.model.lora import (
    LoraShape,
    LowRank,
    PublishedLayer,
    adapters_of,
    add_adapters,
    published_layers,
    with_shared_weights,
)
from bertsmith.model.network import Network, add_missing_supports, published_names

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
BASE_FINGERPRINT = "base_fingerprint"
"""Key in the metadata of the weights file: peft rejects unknown keys in its config."""
FINGERPRINT_VALUES = 256
"""Approximate number of values of each weight that the fingerprint covers."""
PREFIX = "base_model.model."
"""Prefix that peft adds to every published name."""
LOW_RANK_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
TASK_TYPES = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS", "span": "QUESTION_ANS"}
"""peft's task type of each head; peft does not have one for choices among texts."""
WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "task_type"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules"),
    *("lora_alpha", "lora_dropout", "r", "rank_pattern", "use_rslora", "bias", "init_lora_weights"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
    *("corda_config", "eva_config", "lora_ga_config"),
}
"""Keys that are read here, that the tensors determine, or that matter only in training; others must be off.

(The tensors determine the rank. fan_in_fan_out is for layers that hold [inputs, outputs], like GPT-2's; peft
turns it off for others.)
"""
PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the weights of the base."""
NO_FOLDER = (UserError, OSError, RuntimeError, ValueError)
"""Errors that an untrusted path can raise: missing, too long, unknown home directory, NUL byte."""
MAX_NAME = 200
BROKEN = "copy the whole adapter folder again, or train it again"


@dataclass(frozen=True, slots=True)
class Adapter:
    """Content of an adapter folder."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """Tensors by published name, without peft's prefix."""
    base_fingerprint: str = ""
    """Fingerprint of the base that it was trained over; only bertsmith writes one."""

    @property
    def base(self) -> str:
        """Name of its base model in the config."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def config_file(self) -> Path:
        """Path of its config."""
        return self.folder / ADAPTER_CONFIG

    @property
    def weights_file(self) -> Path:
        """Path of its tensors."""
        return self.folder / ADAPTER_WEIGHTS


# ---- reading


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter of a folder; refuse one that bertsmith cannot compute."""
    config = read_json(folder / ADAPTER_CONFIG, remedy=BROKEN)
    _check_config(config, where=str(folder / ADAPTER_CONFIG))
    tensors = read_safetensors(folder / ADAPTER_WEIGHTS, remedy=BROKEN)
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX) or not tensor.is_floating_point() or not tensor.isfinite().all():
            what = f"{name} is not an adapter weight, or contains NaN or infinite values"
            raise UserError(what, where=str(folder / ADAPTER_WEIGHTS), remedy=BROKEN)
    named = {name.removeprefix(PREFIX): each for name, each in tensors.items()}
    return Adapter(folder, config, named, read_metadata(folder / ADAPTER_WEIGHTS).get(BASE_FINGERPRINT, ""))


def _check_config(config: Mapping[str, Any], *, where: str) -> None:
    """Refuse settings that require another computation than the one here."""
    merge = "merge it into its base with peft (merge_and_unload), and open that folder"
    if config.get("peft_type") != "LORA":
        what = f"peft_type is {config.get('peft_type')!r}, but only LORA is supported"
        raise UserError(what, where=where, remedy=merge)
    on = {key: value for key, value in config.items() if value and key not in WITHOUT_EFFECT}
    if config.get("bias", "none") != "none":
        on["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in PLAIN_BEGINNINGS:
        on["init_lora_weights"] = config["init_lora_weights"]
    if on.get("revision") == "main":
        del on["revision"]
    for key, value in on.items():
        raise UserError(f"{key} is {value!r}, which bertsmith does not support", where=where, remedy=merge)
    alpha = config.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not isfinite(alpha):
        raise UserError(f"lora_alpha is {alpha!r}, not a number", where=where, remedy="correct it")


def base_folder(folder: Path, *, given: Path | str | None = None) -> Path:
    """Return the base model folder of an adapter: `given`, or the one named in its config.

    A relative path is tried from the adapter folder, then from the working directory. A name means an
    embedded model, or one in the cache of the Hugging Face tools. An embedded adapter always uses the
    embedded model of that name, whatever the working directory contains.
    """
    found = model_folder(given) if given is not None else _named_base(folder)
    if is_adapter(found):
        remedy = f"merge that one first: bertsmith merge --model {found} --out FOLDER"
        raise UserError("the base of an adapter is an adapter itself", where=str(found), remedy=remedy)
    return found


def _named_base(folder: Path) -> Path:
    config_file = folder / ADAPTER_CONFIG
    named = str(read_json(config_file, remedy=BROKEN).get("base_model_name_or_path") or "")
    remedy = "pass `base=FOLDER`, or set base_model_name_or_path in this file"
    if not named:
        raise UserError("does not name a base model", where=str(config_file), remedy=remedy)
    own = embedded_models()
    if named in own and folder in own.values():
        return own[named]
    try:
        beside = folder / Path(named).expanduser()
        return model_folder(beside if beside.is_dir() else named)
    except NO_FOLDER as error:
        what = f"its base model {shorten(named, MAX_NAME, placeholder='...')!r} is not on this machine"
        raise UserError(what, where=str(config_file), remedy=remedy) from error


def adapted_model(base: Model, adapter: Adapter, finetuned: FinetunedTask | None) -> Model:
    """Return the base with an adapter and its heads; weights that it does not change are shared."""
    _check_base(base, adapter)
    network = with_shared_weights(base.network)
    architecture = architecture_of(network.config.model_type)
    low_rank, whole = _sorted_tensors(adapter, network)
    wanted = _wanted_heads(adapter, architecture, finetuned)
    if whole and not wanted:
        what, remedy = (
            "does not name the head of its weights",
            'add "task_type": "SEQ_CLS", or the type of its head',
        )
        raise UserError(what, where=str(adapter.config_file), remedy=remedy)
    own = CheckpointTensors(whole, architecture, network.config, adapter.weights_file, adapter.config_file)
    brought = [head for head in wanted if own.names_of(head) & whole.keys() or head not in network.heads]
    # If the adapter has only a part of a head, the base has the rest (the dense layer under ModernBERT's).
    ours, rest = network.state_dict(), published_names(network.config, dict.fromkeys(network.heads, 0))
    for head in brought:
        for name, theirs in rest.items():
            if theirs[0] in own.names_of(head) and theirs[0] not in whole:
                whole[theirs[0]] = ours[name]
    heads = own.heads(brought)
    for head in set(network.heads) - set(wanted) if wanted else ():
        del network.heads[head]
    names = {
        name: theirs
        for name, theirs in published_names(network.config, heads).items()
        if name.startswith("heads.")
    }
    if left := own.unused(names):
        what = f"contains weights that fit none of the heads of {architecture.model_type}: {left}"
        raise UserError(what, where=str(adapter.weights_file), remedy=BROKEN)
    like = network.encoder.words.weight
    for head, outputs in heads.items():
        network.heads[head] = architecture.heads[head].build(network.config, outputs)
    # The network's other weights are loaded already: require only the new heads' weights.
    expected = {name: tensor for name, tensor in network.state_dict().items() if name in names}
    assembled = own.assembled(names, expected, like.dtype)
    network.load_state_dict(assembled, strict=False, assign=True)
    network.heads.to(like.device)
    add_adapters(network, _adapters(adapter, network, low_rank))
    fresh = add_missing_supports(network, torch.Generator().manual_seed(0))
    untrained = (*(head for head in base.untrained if head in network.heads and head not in heads), *fresh)
    extras = _with_labels(base, network, finetuned)
    return replace(base, network=network.eval(), extras=extras, notes=(), untrained=untrained)


def _check_base(base: Model, adapter: Adapter) -> None:
    """Refuse a base that the adapter was not trained over: the predictions would be nonsense."""
    if is_quantised(base.network):
        remedy = "merge it into the model it was trained over (bertsmith merge), and quantise that"
        raise UserError("quantised weights do not support adapters", where=str(adapter.folder), remedy=remedy)
    if adapter.base_fingerprint not in ("", fingerprint(base.network)):
        what = "the adapter was trained over another base: the weights differ"
        remedy = "give the base that the adapter was trained over, with `base`"
        raise UserError(what, where=str(adapter.folder), remedy=remedy)


def _sorted_tensors(
    adapter: Adapter, network: Network
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Return A and B by the published names of their layers, and whole weights by their own names."""
    prefix = architecture_of(network.config.model_type).prefix
    layers, low_rank, whole = published_layers(network), dict[str, dict[str, Tensor]](), dict[str, Tensor]()
    for name, tensor in adapter.tensors.items():
        found = LOW_RANK_NAME.fullmatch(name)
        if found is None and ".lora_" in name:
            what = f"{name} is not part of plain LoRA on a linear layer"
            raise UserError(what, where=str(adapter.weights_file), remedy="adapt linear layers only")
        if found is None:
            whole[name] = tensor
            continue
        # The names of an adapter over the bare encoder lack a prefix.
        layer = next((each for each in (found["layer"], prefix + found["layer"]) if each in layers), None)
        if layer is None:
            what = f"{found['layer']} is not a linear layer of the base, a {network.config.model_type} model"
            remedy = "give the base that the adapter was trained over, with `base`"
            raise UserError(what, where=str(adapter.weights_file), remedy=remedy)
        low_rank.setdefault(layer, {})[found["part"]] = tensor
    return low_rank, whole


def _adapters(
    adapter: Adapter, network: Network, low_rank: Mapping[str, Mapping[str, Tensor]]
) -> dict[PublishedLayer, LowRank]:
    found, layers, like = {}, published_layers(network), network.encoder.words.weight
    alpha, stabilized = float(adapter.config.get("lora_alpha", 8)), bool(adapter.config.get("use_rslora"))
    for name, parts in low_rank.items():
        layer = layers[name]
        linear = network.get_submodule(layer.ours)
        assert isinstance(linear, nn.Linear), "published_layers returns linear layers only"
        inputs, outputs = linear.in_features, linear.out_features // layer.stacked
        shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
        rank = next(iter(shapes.get("A", ())), 0)
        if shapes != {"A": [rank, inputs], "B": [outputs, rank]} or not rank:
            what = f"A and B of {name} have the shapes {shapes}, but the layer is {outputs} x {inputs}"
            remedy = "give the base that the adapter was trained over, with `base`"
            raise UserError(what, where=str(adapter.weights_file), remedy=remedy)
        shape = LoraShape(rank, alpha, rank_stabilized=stabilized)
        low = LowRank(parts["A"].to(like), parts["B"].to(like), scaling=shape.scaling)
        found[layer] = low.requires_grad_(False)
    return found


def _wanted_heads(
    adapter: Adapter, architecture: Architecture[Any], finetuned: FinetunedTask | None
) -> tuple[str, ...]:
    """Return the heads that the adapter was trained with; () keeps the base's heads."""
    mapping = adapter.config.get("auto_mapping") or {}
    published_class = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    task_type = adapter.config.get("task_type")
    head = next((head for head, named in TASK_TYPES.items() if named == task_type), None)
    if finetuned is not None:
        head = finetuned.config.head_name
    if head is None:
        return architecture.classes.get(str(published_class), ())
    if head not in architecture.heads:
        what = f"{architecture.model_type} models lack the {head} head that the adapter was trained with"
        remedy = "give the base that the adapter was trained over, with `base`"
        raise UserError(what, where=str(adapter.folder), remedy=remedy)
    return (head, *architecture.heads[head].needs)


def _with_labels(base: Model, network: Network, finetuned: FinetunedTask | None) -> dict[str, Any]:
    """Return the keys of config.json; labels are the task's, or the base's if their number fits."""
    if finetuned is not None:
        config = finetuned.config
        spoken_for = ("id2label", "label2id", "problem_type")
        kept = {key: value for key, value in base.extras.items() if key not in spoken_for}
        return {**kept, **config.kind.config_keys(config.labels)}
    specs = architecture_of(network.config.model_type).heads
    outputs = {number for name, number in head_outputs(network).items() if specs[name].labelled}
    fits = not outputs or len(base.labels()) in outputs
    return {key: value for key, value in base.extras.items() if fits or key not in ("id2label", "label2id")}


def fingerprint(network: Network) -> str:
    """Return a hash of the encoder's own weights, independent of adapters and of the precision.

    It covers some values of each weight: bases differ in all of them, and hashing a large one takes long.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(network.encoder.state_dict().items()):
        if ".adapters." not in name and tensor.is_floating_point():
            flat = tensor.detach().flatten()
            some = flat[:: max(1, flat.numel() // FINGERPRINT_VALUES)].to("cpu", torch.bfloat16)
            found.update(name.encode() + some.view(torch.int16).numpy().tobytes())
    return found.hexdigest()


# ---- writing


def base_name(given: Path) -> str:
    """Return the base's name for an adapter: as given, an embedded model's name, or an absolute path."""
    if not given.expanduser().is_dir():
        return str(given)
    folder = transformer_folder(model_folder(given)).resolve()
    return next((name for name, own in embedded_models().items() if own.resolve() == folder), str(folder))


def write_adapter(folder: Path, network: Network, head: str, *, shape: LoraShape, base: str) -> None:
    """Write adapters, and the heads that were trained with them, into an unfinished folder."""
    architecture = architecture_of(network.config.model_type)
    heads = [name for name, each in network.heads.items() if any(w.requires_grad for w in each.parameters())]
    low_rank = dict(adapters_of(network))
    tensors = {}
    for name, adapter in low_rank.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = adapter.lora_A
        tensors[f"{PREFIX}{name}.lora_B.weight"] = adapter.lora_B
    ours, saved = network.state_dict(), set[str]()
    for name, theirs in published_names(network.config, dict.fromkeys(heads, 0)).items():
        if name.startswith("heads."):
            (published,) = theirs
            tensors[PREFIX + published] = ours[name]
            saved.add(published.removeprefix(architecture.prefix).split(".")[0])
    held_heads = dict.fromkeys(architecture.heads, 0)
    universe = [
        name.removesuffix(".weight")
        for theirs in published_names(network.config, held_heads).values()
        for name in theirs
        if name.endswith(".weight")
    ]
    config = {
        "auto_mapping": None if head in TASK_TYPES else _class_with(architecture, head),
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": any(architecture.transposed(f"{name}.weight") for name in low_rank),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(shape.alpha) if shape.alpha.is_integer() else shape.alpha,
        "lora_dropout": shape.dropout,
        "modules_to_save": sorted(saved),
        "peft_type": "LORA",
        "r": shape.rank,
        "target_modules": _shortest_suffixes(low_rank, universe),
        "task_type": TASK_TYPES.get(head),
        "use_dora": False,
        "use_rslora": shape.rank_stabilized,
    }
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_json(folder / ADAPTER_CONFIG, config)
    metadata = {**FOR_TORCH, BASE_FINGERPRINT: fingerprint(network)}
    write_safetensors(folder / ADAPTER_WEIGHTS, held, metadata)


def _class_with(architecture: Architecture[Any], head: str) -> dict[str, str]:
    """Return the name in transformers of a class for a head that peft does not have a task type for."""
    published = next(name for name, heads in architecture.classes.items() if head in heads)
    room = architecture.model_type.replace("-", "_")
    return {"base_model_class": published, "parent_library": f"transformers.models.{room}.modeling_{room}"}


def _shortest_suffixes(targets: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Return the shortest name endings that make peft find these layers and no others."""
    targets = list(targets)
    others = [f".{name}" for name in set(universe) - set(targets)]
    chosen = set()
    for target in targets:
        parts = target.split(".")
        ends = (".".join(parts[first:]) for first in reversed(range(len(parts))))
        chosen.add(next(end for end in ends if not any(name.endswith(f".{end}") for name in others)))
    return sorted(chosen)

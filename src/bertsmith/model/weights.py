"""Model folders: a network from `config.json` and its weights under their published names, and back."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_folder, read_json, write_json
from bertsmith.model.family import add_missing_supports, build_network, member_of, published_names
from bertsmith.model.heads import OutputHead
from bertsmith.model.member import Member
from bertsmith.model.network import Network
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape
from bertsmith.model.tensor_files import read_tensors, remove_other_tensors, write_tensors

SHARD_BYTES = 5_000_000_000
NOT_KEPT = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")
"""Keys of a config.json that describe the file rather than the model; they are written anew."""
SHOWN_NAMES = 8
WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Model:
    """A network as it comes from a model folder."""

    network: Network
    extras: dict[str, Any] = field(default_factory=dict)
    """What config.json says beyond the shape, labels among it; written back as it was."""
    notes: tuple[str, ...] = ()
    """What the reader of the folder should know: weights that belong nowhere, a pooler that is not there."""
    untrained: tuple[str, ...] = ()
    """Heads that the folder lacked and that were freshly drawn."""

    def labels(self) -> tuple[str, ...]:
        """The names of a task head's outputs, in order."""
        by_number = self.extras.get("id2label") or {}
        return tuple(str(by_number[number]) for number in sorted(by_number, key=int))


def read_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> Model:
    """The network of a Hugging Face model folder, ours or anyone's."""
    if not folder.is_dir():
        raise UserError("is not a folder", where=str(folder), remedy="give the folder that holds config.json")
    config = read_json(
        folder / "config.json", remedy="a model folder holds config.json, weights and tokenizer files"
    )
    return model_from_tensors(config, read_tensors(folder), where=folder, dtype=dtype)


def model_from_tensors(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    where: Path,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """The network of a config.json's contents and tensors under their published names."""
    settings = Settings(config, str(where / "config.json"))
    member = _member(config, settings.where)
    shape = _read_shape(member, settings)
    held = _with_first_names(dict(tensors), member, shape)
    heads = _heads_in(held, member, shape, settings, where)
    if "mlm" in heads:
        settings.refuse_unless("tie_word_embeddings", True, True)
    names = published_names(shape, heads)
    with torch.device("meta"):  # sizes are compared before any memory is taken for them
        network = build_network(shape, heads)
    network.load_state_dict(_our_tensors(network, names, held, where, dtype), assign=True)
    fresh = add_missing_supports(network, torch.Generator().manual_seed(0))
    _refuse_odd_labels(settings)
    extras = {key: value for key, value in settings.rest().items() if key not in NOT_KEPT}
    return Model(network.eval(), extras, tuple(_notes(held, names, member, fresh)), tuple(fresh))


def write_model(folder: Path, model: Model, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Store a network so that `read_model` and transformers open it; all files or none."""
    network = model.network
    shape, heads = network.shape, head_outputs(network)
    member = member_of(shape.model_type)
    architecture = _architecture(member, set(heads))
    tensors = _published_tensors(network, published_names(shape, heads))
    if architecture.endswith("Model"):
        tensors = {name.removeprefix(member.prefix): tensor for name, tensor in tensors.items()}
    kind = str(next(network.parameters()).dtype).removeprefix("torch.")
    config = {**model.extras, **_label_keys(model, heads), **member.write_config(shape)}
    with atomic_folder(folder) as fresh:
        write_json(fresh / "config.json", {"architectures": [architecture], "dtype": kind, **config})
        write_tensors(fresh, tensors, shard_bytes)
        written = {file.name for file in fresh.iterdir()}
    remove_other_tensors(folder, written)


def head_outputs(network: Network) -> dict[str, int]:
    """The heads of a network and the number of their outputs (0 where the head is no output layer)."""
    return {
        name: head.output.out_features if isinstance(head, OutputHead) else 0
        for name, head in network.heads.items()
    }


# ---- reading


def _member(config: Mapping[str, Any], where: str) -> Member:
    if "model_type" not in config:
        raise UserError(
            "has no model_type", where=where, remedy='add "model_type": "bert", or what the model is'
        )
    return member_of(str(config["model_type"]), where=where)


def _read_shape(member: Member, settings: Settings) -> Shape:
    shape = member.read_shape(settings)
    if shape.width % shape.heads:
        what = f"{shape.heads} attention heads do not divide a width of {shape.width}"
        raise UserError(what, where=settings.where, remedy="correct the two numbers")
    if shape.positions < 1:
        raise UserError(
            "max_position_embeddings leaves no position", where=settings.where, remedy="correct it"
        )
    return shape


def _with_first_names(held: dict[str, Tensor], member: Member, shape: Shape) -> dict[str, Tensor]:
    """Tensors under one spelling: today's LayerNorm names, the prefix, the first of two tied names."""
    shared = {name for names in member.encoder_names(shape).values() for name in names}
    pooler = member.heads["pooler"].names(shape) if "pooler" in member.heads else {}
    shared |= {name.removeprefix(member.prefix) for names in pooler.values() for name in names}
    renamed = {}
    for name, tensor in held.items():
        modern = re.sub(r"LayerNorm\.(gamma|beta)$", _modern_norm, name)
        renamed[member.prefix + modern if modern in shared else modern] = tensor
    for second, first in member.tied.items():
        if second in renamed:
            renamed.setdefault(first, renamed.pop(second))
    return renamed


def _modern_norm(match: re.Match[str]) -> str:
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[match[1]]


def _heads_in(
    held: Mapping[str, Tensor], member: Member, shape: Shape, settings: Settings, where: Path
) -> dict[str, int]:
    """The heads whose weights are there; where two heads share names, the architecture decides."""
    named = settings.texts("architectures")
    expected = [head for name in named for head in member.architectures.get(name, ())]
    claimed: set[str] = set()
    heads = {}
    for head in [*expected, *member.heads]:
        names = {name for theirs in member.heads[head].names(shape).values() for name in theirs}
        if names <= held.keys() and not names & claimed:
            heads[head] = _outputs(held, member, head, shape)
            claimed |= names
        elif head in expected and head not in heads and (head != "pooler" or names & held.keys()):
            _refuse_missing(names - held.keys(), where)
    return heads


def _outputs(held: Mapping[str, Tensor], member: Member, head: str, shape: Shape) -> int:
    names = member.heads[head].names(shape)
    if "output.weight" not in names:
        return 0
    matrix = held[names["output.weight"][0]]
    # What is no matrix of some rows is refused later, by its size.
    return int(matrix.shape[0]) if matrix.dim() == 2 and len(matrix) else 1


def _our_tensors(
    network: Network,
    names: Mapping[str, tuple[str, ...]],
    held: Mapping[str, Tensor],
    where: Path,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    _refuse_missing({name for theirs in names.values() for name in theirs} - held.keys(), where)
    expected = network.state_dict()
    ours = {}
    for name, theirs in names.items():
        parts = [_checked(held[each], each, where, dtype) for each in theirs]
        rows = [len(expected[name]) // len(parts), *expected[name].shape[1:]]
        for each, part in zip(theirs, parts, strict=True):
            _refuse_other_size(part, rows, each, where)
        ours[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return ours


def _refuse_odd_labels(settings: Settings) -> None:
    labels = settings.values.get("id2label") or {}
    numbered = isinstance(labels, dict) and all(str(number).isdecimal() for number in labels)
    if not numbered:
        what = f"id2label is {labels!r}"
        raise UserError(what, where=settings.where, remedy='write it as {"0": "first label", ...}')


def _checked(tensor: Tensor, name: str, where: Path, dtype: torch.dtype) -> Tensor:
    if tensor.dtype not in WEIGHT_TYPES:
        what = f"{name} holds {tensor.dtype}, not numbers of 16, 32 or 64 bits"
        raise UserError(what, where=str(where), remedy="export it as float32")
    weights = tensor.to(dtype)
    if not weights.isfinite().all():
        what = f"{name} holds NaN or infinite values"
        raise UserError(what, where=str(where), remedy="use an earlier checkpoint")
    return weights


def _refuse_other_size(tensor: Tensor, size: list[int], name: str, where: Path) -> None:
    if list(tensor.shape) != size:
        what = f"{name} is {list(tensor.shape)} but config.json asks for {size}"
        raise UserError(
            what, where=str(where), remedy="config.json and the weights belong to different models"
        )


def _refuse_missing(names: set[str], where: Path) -> None:
    if names:
        raise UserError(
            f"weights are missing: {_listed(names)}",
            where=str(where),
            remedy="the file is incomplete or of another model",
        )


def _notes(
    held: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], member: Member, fresh: list[str]
) -> Iterable[str]:
    used = {name for theirs in names.values() for name in theirs}
    # Old files also store constant buffers.
    unexpected = {
        name for name in held.keys() - used if not name.endswith(("position_ids", "token_type_ids"))
    }
    if unexpected:
        yield f"weights that belong to no part of {member.model_type} were left out: {_listed(unexpected)}"
    if fresh:
        yield f"not in the folder and freshly initialised, so train before use: {', '.join(fresh)}"


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:SHOWN_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


# ---- writing


def _architecture(member: Member, heads: set[str]) -> str:
    """The published class that holds most of these heads and no others."""
    fitting = [name for name, held in member.architectures.items() if set(held) <= heads]
    # A class with a head says more than the bare model, even where the pooler makes them hold equally many.
    best = max(
        fitting, key=lambda name: (len(member.architectures[name]), not name.endswith("Model")), default=""
    )
    return best or next(name for name in member.architectures if name.endswith("Model"))


def _published_tensors(network: Network, names: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    ours = network.state_dict()
    published: dict[str, Tensor] = {}
    for name, theirs in names.items():
        # Clones: a file must not store one memory twice, nor the rest of a view's memory.
        parts = ours[name].detach().cpu().chunk(len(theirs))
        published |= {
            each: part.clone(memory_format=torch.contiguous_format)
            for each, part in zip(theirs, parts, strict=True)
        }
    return published


def _label_keys(model: Model, heads: Mapping[str, int]) -> dict[str, Any]:
    """id2label and its inverse for a task head without labels: readers take its size from them."""
    outputs = heads.get("classify") or heads.get("tag")
    if not outputs or len(model.labels()) == outputs:
        return {}
    labels = [f"LABEL_{number}" for number in range(outputs)]
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }

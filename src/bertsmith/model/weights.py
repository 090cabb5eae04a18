"""Model folders: a network from `config.json` and its weights under their published names, and back."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bertsmith.ground.errors import UserError
from bertsmith.ground.files import atomic_folder, read_json, write_json
from bertsmith.model.family import add_missing_supports, build_network, member_of, published_names
from bertsmith.model.heads import OutputHead
from bertsmith.model.member import Member, published_in
from bertsmith.model.network import Network
from bertsmith.model.published import under_one_spelling
from bertsmith.model.settings import Settings
from bertsmith.model.shape import Shape
from bertsmith.model.tensor_files import WEIGHT_FILES, read_tensors, write_tensors

SHARD_BYTES = 5_000_000_000
NOT_KEPT = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "model_type", "num_labels"),
    *("_name_or_path", "auto_map"),
}
"""Keys of a config.json that speak of the file, not of the model, or lead to someone's code."""


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
    remedy = "a model folder holds config.json, weights and tokenizer files"
    config = read_json(folder / "config.json", remedy=remedy)
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
    published = under_one_spelling(tensors, member, shape, where)
    heads = published.heads(_expected_heads(member, settings))
    names = published_names(shape, heads)
    published.refuse_missing(published_in(names))
    with torch.device("meta"), _NothingDrawn():  # sizes are compared before any memory is taken for them
        network = build_network(shape, heads)
    network.load_state_dict(published.assembled(names, network.state_dict(), dtype), assign=True)
    _refuse_unfit_settings(settings, heads)
    fresh = add_missing_supports(network, torch.Generator().manual_seed(0))
    extras = {key: value for key, value in settings.rest().items() if key not in NOT_KEPT}
    return Model(network.eval(), extras, tuple(_notes(published.unused(names), member, fresh)), tuple(fresh))


def write_model(folder: Path, model: Model, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Store a network so that `read_model` and transformers open it.

    A new folder appears whole or not at all; in one that exists, weights are replaced before config.json.
    """
    network = model.network
    shape, heads = network.shape, head_outputs(network)
    member = member_of(shape.model_type)
    _refuse_shared_names(member, shape, set(heads))
    architectures = _architectures(member, shape, set(heads))
    tensors = _published_tensors(network, published_names(shape, heads))
    if architectures == [_bare_class(member)]:
        tensors = {name.removeprefix(member.prefix): tensor for name, tensor in tensors.items()}
    kind = str(next(network.parameters()).dtype).removeprefix("torch.")
    config = {**model.extras, **_label_keys(model, heads), **member.write_config(shape), "dtype": kind}
    with atomic_folder(folder, replaces=WEIGHT_FILES) as fresh:
        write_json(fresh / "config.json", {**config, "architectures": architectures})
        write_tensors(fresh, tensors, shard_bytes)


def head_outputs(network: Network) -> dict[str, int]:
    """The heads of a network and the number of their outputs (0 where the head is no output layer)."""
    return {
        name: head.output.out_features if isinstance(head, OutputHead) else 0
        for name, head in network.heads.items()
    }


# ---- reading


class _NothingDrawn(TorchFunctionMode):
    """Modules come without initial weights: to draw them on the meta device, torch loads its compiler."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        draws = getattr(function, "__module__", "") == torch.nn.init.__name__
        return named["tensor"] if draws else function(*args, **named)


def _member(config: Mapping[str, Any], where: str) -> Member:
    if config.get("model_type") is None:
        remedy = 'add "model_type": "bert", or what the model is'
        raise UserError("has no model_type", where=where, remedy=remedy)
    return member_of(str(config["model_type"]), where=where)


def _read_shape(member: Member, settings: Settings) -> Shape:
    shape = member.read_shape(settings)
    if shape.width % shape.heads:
        what = f"{shape.heads} attention heads do not divide a width of {shape.width}"
        raise UserError(what, where=settings.where, remedy="correct the two numbers")
    if shape.positions < 1:
        what = "max_position_embeddings leaves no position"
        raise UserError(what, where=settings.where, remedy="correct it")
    return shape


def _expected_heads(member: Member, settings: Settings) -> list[str]:
    return [head for name in settings.texts("architectures") for head in member.architectures.get(name, ())]


def _refuse_unfit_settings(settings: Settings, heads: Mapping[str, int]) -> None:
    """Stop at settings that do not fit the heads found: an untied decoder, labels of another number."""
    if "mlm" in heads:
        settings.refuse_unless("tie_word_embeddings", True, True)
    labels = settings.values.get("id2label") or {}
    if not isinstance(labels, dict) or not all(str(number).isdecimal() for number in labels):
        what = f"id2label is {labels!r}"
        raise UserError(what, where=settings.where, remedy='write it as {"0": "first label", ...}')
    outputs = heads.get("classify") or heads.get("tag")
    if outputs and labels and len(labels) != outputs:
        what = f"id2label names {len(labels)} labels but the head has {outputs} outputs"
        raise UserError(what, where=settings.where, remedy="name each output once")


def _notes(unused: str, member: Member, fresh: list[str]) -> Iterator[str]:
    if unused:
        yield f"weights that belong to no part of {member.model_type} were left out: {unused}"
    if fresh:
        yield f"not in the folder and freshly initialised, so train before use: {', '.join(fresh)}"


# ---- writing


def _share_names(member: Member, shape: Shape, heads: tuple[str, str]) -> bool:
    one, other = (member.names_of_head(head, shape) for head in heads)
    return bool(one & other)


def _refuse_shared_names(member: Member, shape: Shape, heads: set[str]) -> None:
    for pair in combinations(sorted(heads), 2):
        if _share_names(member, shape, pair):
            what = f"the heads {pair[0]} and {pair[1]} of {member.model_type} go by the same published names"
            raise UserError(what, remedy="remove one of them and save again")


def _architectures(member: Member, shape: Shape, heads: set[str]) -> list[str]:
    """The published classes that together name these heads, the ones that settle doubts first."""
    chosen: list[str] = []
    left = set(heads)
    # A class may also name a pooler that is not there: readers draw a fresh one, as for any such folder.
    fitting = [name for name, held in member.architectures.items() if set(held) <= heads | {"pooler"}]
    for name in sorted(fitting, key=lambda name: _rank(member, shape, name)):
        if left & set(member.architectures[name]) and not (chosen and name == _bare_class(member)):
            chosen.append(name)
            left -= set(member.architectures[name])
    return chosen or [_bare_class(member)]


def _rank(member: Member, shape: Shape, architecture: str) -> tuple[bool, int]:
    held = member.architectures[architecture]
    doubtful = any(
        _share_names(member, shape, (head, other)) for head in held for other in member.heads if other != head
    )
    return (not doubtful, -len(held))


def _bare_class(member: Member) -> str:
    return next(name for name in member.architectures if name.endswith("Model"))


def _published_tensors(network: Network, names: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    ours = network.state_dict()
    published: dict[str, Tensor] = {}
    for name, theirs in names.items():
        # Clones: a file must not store one memory twice, nor the rest of a view's memory.
        parts = [part.clone() for part in ours[name].detach().cpu().contiguous().chunk(len(theirs))]
        published |= dict(zip(theirs, parts, strict=True))
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

"""What a fine-tuning run begins with: a trained encoder with the head of the task on it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bertsmith.ground.errors import UserError
from bertsmith.ground.seeds import key_of
from bertsmith.inference.bert import load
from bertsmith.inference.task_model import leave_pooler_out
from bertsmith.model.family import add_fresh_head, member_of
from bertsmith.model.heads import OutputHead
from bertsmith.model.initial import initialise
from bertsmith.model.network import Network
from bertsmith.model.weights import Model
from bertsmith.tasks.task_file import TaskNote
from bertsmith.text.tokenizer import Tokenizer

MIX_NOTE = (
    "a mix of all layers and a BiLSTM learn: bertsmith finds them in mix.safetensors; to other tools the "
    "folder is an encoder without a head"
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A network that has the task's head and no other (none under a mix), and what there is to know of it."""

    network: Network
    tokenizer: Tokenizer
    fresh: tuple[str, ...]
    """Heads that were drawn anew."""
    kept: bool
    """Whether the task's head is the folder's own."""
    notes: tuple[str, ...]


def begin(folder: Path, note: TaskNote, *, seed: int) -> Beginning:
    """The encoder of a model folder with the head that the note asks for, its own or a fresh one."""
    bert = load(folder, device="cpu")
    network, stream = bert.model.network, torch.Generator().manual_seed(key_of(seed, "task head"))
    _refuse_longer_texts(network, note, where=str(folder))
    if note.head.encoder == "frozen-mix":
        _leave_bare(bert.model, note)
        return Beginning(network, bert.tokenizer, fresh=(), kept=False, notes=(MIX_NOTE,))
    kept, fresh = _put_head(bert.model, note, stream)
    notes = [f"the head {note.head_name} of the folder goes on"] if kept else []
    notes += [f"the head {name} starts from fresh weights" for name in fresh]
    if note.head.fresh_layers:
        notes.append(_renew_layers(network, note, stream))
    return Beginning(network, bert.tokenizer, fresh, kept, tuple(notes))


def _leave_bare(model: Model, note: TaskNote) -> None:
    """Take every head off but a trained pooler: what a mix learns has no head, and a random one misleads."""
    if note.head.cls == "raw":
        remedy = "leave it at pooled"
        raise UserError("a mix of all layers reads raw states already", where="head.cls", remedy=remedy)
    if note.head.fresh_layers:
        raise _frozen_anew(note)
    for name in set(model.network.heads) - ({"pooler"} - set(model.untrained)):
        del model.network.heads[name]


def _put_head(model: Model, note: TaskNote, stream: torch.Generator) -> tuple[bool, tuple[str, ...]]:
    """Put the task's head on; whether it is the folder's own, and the names of all that was drawn anew."""
    network = model.network
    kept = _keep_own_head(model, note)
    drawn = [] if kept else add_fresh_head(network, note.head_name, note.outputs, stream)
    if note.head.cls == "raw" and not leave_pooler_out(network, note.head_name):
        what = f"the {note.head_name} head of {network.shape.model_type} reads raw states already"
        raise UserError(what, where="head.cls", remedy="leave it at pooled")
    fresh = dict.fromkeys([*drawn, *model.untrained])
    return kept, tuple(name for name in fresh if name in network.heads)


def _keep_own_head(model: Model, note: TaskNote) -> bool:
    """Take every head off that the task has no use for; whether the task's own is left."""
    network, name = model.network, note.head_name
    member = member_of(network.shape.model_type)
    if name not in member.heads:
        what = f"{member.model_type} has no head for {note.kind} tasks"
        raise UserError(what, remedy="take a model of another family")
    kept = name in network.heads and _fits(model, note)
    wanted = {*member.heads[name].needs, *([name] if kept else [])}
    for other in set(network.heads) - wanted:
        del network.heads[other]
    return kept


def _fits(model: Model, note: TaskNote) -> bool:
    """Whether the folder's own head answers the same question: as many outputs, the same labels."""
    head = model.network.heads[note.head_name]
    if not isinstance(head, OutputHead) or head.output.out_features != note.outputs:
        return False
    return not note.labels or model.labels() == note.labels


def _renew_layers(network: Network, note: TaskNote, stream: torch.Generator) -> str:
    """Draw the last layers anew (Zhang et al. 2021)."""
    blocks, count = network.encoder.blocks, note.head.fresh_layers
    if note.head.encoder != "tuned":
        raise _frozen_anew(note)
    if count > len(blocks):
        what = f"the model has {len(blocks)} layers of its own, not {count}"
        raise UserError(what, where="head.fresh_layers", remedy=f"choose at most {len(blocks)}")
    rule = member_of(network.shape.model_type).initial(network.shape)
    for block in list(blocks)[len(blocks) - count :]:
        initialise(block, rule, stream)
    return f"the last {count} layers start from fresh weights"


def _frozen_anew(note: TaskNote) -> UserError:
    what = f"layers that begin anew cannot stay frozen (head.encoder = {note.head.encoder})"
    return UserError(what, where="head.fresh_layers", remedy="leave it at 0, or tune the encoder")


def _refuse_longer_texts(network: Network, note: TaskNote, *, where: str) -> None:
    if note.text.longest > network.shape.positions:
        what = f"takes {network.shape.positions} tokens, and text.longest = {note.text.longest}"
        raise UserError(what, where=where, remedy=f"--set text.longest={network.shape.positions}")

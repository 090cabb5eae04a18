"""Export of a pruned model as a folder that transformers opens, with zeros for pruned units."""

from dataclasses import replace
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import new_folder
from bertsmith.inference.finetuned_folder import FinetunedTask
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.heads import OutputHead
from bertsmith.model.network import Network
from bertsmith.model.transformer.transformer_config import TransformerConfig, with_heads
from bertsmith.shrink.slicing import zero_filled_network


def export_transformers(folder: Path, out: Path, *, base: Path | None = None) -> list[str]:
    """Write a model in a published shape; return notes on the units that became zeros."""
    with new_folder(out, key="transformers") as fresh:
        return _export(folder, fresh, base)


def _export(folder: Path, out: Path, base: Path | None) -> list[str]:
    bert = load(folder, device="cpu", base=base)
    if is_quantised(bert.model.network):
        remedy = "export the model that it was made from, or export it with `onnx`"
        raise UserError("transformers cannot open quantised weights", where=str(folder), remedy=remedy)
    if bert.finetuned is not None:
        bert.finetuned.check_exportable(folder)
        _check_reading(bert.model.network, bert.finetuned, where=str(folder))
    config = bert.model.network.config
    filled = zero_filled_network(bert.model.network) if config.own_keys() else None
    network = bert.model.network if filled is None else filled
    if only_ours := network.config.own_settings():
        what = f"no published {config.model_type} has {', '.join(only_ours)} as set here"
        graph = ", or export it with `onnx`" if network.encoder.heads else ""
        remedy = f"use it with bertsmith{graph}"
        raise UserError(what, where=str(folder), remedy=remedy)
    whole = replace(bert.model, network=network)
    Bert(whole, bert.tokenizer, device="cpu", finetuned=bert.finetuned).save(out)
    return [] if filled is None else _notes(with_heads(config))


def _check_reading(network: Network, finetuned: FinetunedTask, *, where: str) -> None:
    """Raise an error if the head was trained on other states than transformers gives to it."""
    chosen, head = finetuned.config.head, network.heads[finetuned.config.head_name]
    skips = finetuned.skips_pooler and isinstance(head, OutputHead) and head.reads == "pooled"
    if skips or chosen.pooling not in ("model", network.encoder.sentence):
        setting = f"head.cls={chosen.cls}" if skips else f"head.pooling={chosen.pooling}"
        what = (
            f"its head was trained with {setting}, which config.json cannot express: its scores would change"
        )
        raise UserError(what, where=where, remedy="export it with `onnx`, or fine-tune without the setting")


def _notes(config: TransformerConfig) -> list[str]:
    blocks = range(config.blocks)
    removed = {
        "heads": sum(config.heads - config.heads_in(block) for block in blocks),
        "feed-forward neurons": sum(config.inner - config.inner_in(block) for block in blocks),
    }
    filled = " and ".join(f"{count:,} {noun}" for noun, count in removed.items() if count)
    return [f"{filled} that were pruned are zeros here: same outputs, but not smaller or faster"]

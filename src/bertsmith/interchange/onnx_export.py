"""Export to ONNX: a folder that onnxruntime, OpenVINO and optimum open, or a single file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertsmith.core.errors import UserError
from bertsmith.core.files import atomic_folder, atomic_path, check_not_taken, write_json
from bertsmith.inference.finetuned_folder import FinetunedTask
from bertsmith.inference.loaded_model import load
from bertsmith.model.folder.model_folder import published_config
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.inference.inference_network import stored_weights
from bertsmith.model.inference.quantised_weights import QuantisedLinear, bits_of
from bertsmith.model.network import Network, set_pooling

if TYPE_CHECKING:
    import onnx

PRECISIONS = ("fp32", "fp16", "int8")
MODEL_FILE = "model.onnx"
MAX_BYTES = 1_900_000_000
"""Maximum bytes of a single file: protobuf is limited to 2 GB, and larger weights need a second file."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    file: Path
    precision: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]
    """Facts about the export that the user should know."""


def export_onnx(
    model: Path, out: Path, *, precision: str | None = None, base: Path | None = None
) -> Exported:
    """Write a model as ONNX: a folder with config.json and tokenizer, or one file with a name in .onnx."""
    try:
        from bertsmith.interchange.onnx_graph import OPSET
        from bertsmith.interchange.onnx_network import onnx_model
    except ModuleNotFoundError as error:
        raise UserError("exporting needs onnx", remedy="pip install 'bertsmith[onnx]'") from error
    check_not_taken(out, key="onnx")
    bert = load(model, device="cpu", base=base)
    if bert.finetuned is not None:
        bert.finetuned.check_exportable(model)
    chosen, network = _precision(bert.model.network, precision, where=str(model)), bert.model.network
    notes = (*_notes(network), *_as_finetuned(network, bert.finetuned))
    made = onnx_model(network, "fp16" if chosen == "fp16" else "fp32")
    alone = out.suffix == ".onnx"
    if alone and made.ByteSize() > MAX_BYTES:
        what = "the weights are too large for one file and need a second one"
        raise UserError(what, where=str(out), remedy="give a folder")
    if alone:
        with atomic_path(out) as temporary:
            _write(made, temporary)
    else:
        with atomic_folder(out) as fresh:
            _write(made, fresh / MODEL_FILE)
            write_json(fresh / "config.json", published_config(bert.model))
            bert.tokenizer.save(fresh)
            bert.model.sentence.write(fresh)
    inputs, outputs = (tuple(each.name for each in some) for some in (made.graph.input, made.graph.output))
    return Exported(out if alone else out / MODEL_FILE, chosen, OPSET, inputs, outputs, notes)


def _precision(network: Network, asked: str | None, *, where: str) -> str:
    """Return the precision to write, by default the folder's own."""
    if asked is not None and asked not in PRECISIONS:
        raise UserError(f"unknown precision {asked!r}", remedy=f"choose one of {', '.join(PRECISIONS)}")
    if any(isinstance(each, QuantisedLinear) and bits_of(each.whole) != 8 for each in network.modules()):
        what = "has weights of 4 bits, which this version of ONNX does not support"
        raise UserError(what, where=where, remedy="export the model that it was made from")
    own = "int8" if is_quantised(network) else "fp32"
    if own == "int8" and asked not in (None, "int8"):
        what = f"is quantised, and {asked} would be no more exact"
        raise UserError(what, where=where, remedy="omit `precision`, or export the model it was made from")
    if asked == "int8" and own != "int8":
        remedy = "quantise it first, on your own texts: bertsmith quantise --calibrate texts.txt"
        raise UserError("is not quantised", where=where, remedy=remedy)
    return asked or own


def _notes(network: Network) -> list[str]:
    notes = []
    if settings := network.config.own_settings():
        notes.append(
            f"configs of transformers and optimum cannot express {', '.join(settings)}: open the file itself"
        )
    if is_quantised(network) and not stored_weights(network):
        notes.append("only weights are whole numbers: products are computed in floating point")
    return notes


def _as_finetuned(network: Network, finetuned: FinetunedTask | None) -> list[str]:
    """Set up a network as it was fine-tuned; return notes on what config.json cannot express."""
    if finetuned is None:
        return []
    from bertsmith.inference.task_model import leave_pooler_out

    notes, config = [], finetuned.config
    if finetuned.skips_pooler and leave_pooler_out(network, config.head_name):
        notes.append(
            "the head reads the last state instead of the pooler's output, which config.json cannot express"
        )
    if config.head.pooling != "model":
        set_pooling(network, config.head.pooling)
    return notes


def _write(made: "onnx.ModelProto", file: Path) -> None:
    import onnx

    if made.ByteSize() > MAX_BYTES:
        onnx.save_model(made, str(file), save_as_external_data=True, location=f"{MODEL_FILE}_data")
        return
    onnx.checker.check_model(made)
    file.write_bytes(made.SerializeToString(deterministic=True))

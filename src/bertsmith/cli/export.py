"""`bertsmith export`: export a model for other runtimes."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.core.errors import UserError


def export(
    model: Annotated[Path, Option(metavar="FOLDER", help="Model, run or adapter folder (which is merged).")],
    onnx: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Folder to write, or a name ending in .onnx for the file alone."),
    ] = None,
    transformers: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder to write that transformers opens; pruned: zeros.")
    ] = None,
    precision: Annotated[
        str | None, Option(help="fp32, fp16, or int8 (the default for a folder of bertsmith quantise).")
    ] = None,
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """Export a model to ONNX, with its heads, for onnxruntime, OpenVINO and optimum; or for transformers.

    The folder contains model.onnx, config.json and the tokenizer, as optimum's loaders expect. Inputs are
    padded texts, in any number and of any length up to the model's maximum: input_ids, attention_mask and, if
    the model has segments, token_type_ids [texts, tokens]. Outputs are called as in transformers: logits,
    start_logits and end_logits, or last_hidden_state and pooler_output of an encoder without a task.

    Needs the package onnx: pip install 'bertsmith[onnx]'.

    Example: bertsmith export --model runs/sst2 --onnx sst2-onnx

    Example: bertsmith export --model runs/sst2 --precision fp16 --onnx sst2-fp16/

    Example: bertsmith export --model runs/int8 --onnx model.onnx

    transformers opens models of bertsmith without an export, except pruned models with layers that differ.
    With --transformers, removed heads, and removed neurons if layers differ, are written as zeros: the
    outputs are the same, but the model is neither smaller nor faster there.

    Example: bertsmith export --model runs/pruned --transformers models/pruned
    """
    if (onnx is None) == (transformers is None):
        what = "the target is missing" if onnx is None else "they exclude each other"
        raise UserError(what, where="`onnx`, `transformers`", remedy="give one of the two")
    if transformers is not None:
        if precision is not None:
            what, remedy = "weights are exported unchanged for transformers", "remove it, or give `onnx`"
            raise UserError(what, key="precision", remedy=remedy)
        _export_transformers(model, transformers, base, as_json=as_json)
        return
    assert onnx is not None, "one of the two was given"
    from bertsmith.interchange.onnx_export import export_onnx  # torch loads here, not for --help

    made = export_onnx(model, onnx, precision=precision, base=base)
    if as_json:
        print_json({**asdict(made), "file": str(made.file)})
        return
    size = made.file.stat().st_size / 1e6
    echo(f"{model} -> {made.file}: opset {made.opset}, {made.precision}, {size:.1f} MB")
    echo(f"  {', '.join(made.inputs)} -> {', '.join(made.outputs)}")
    for note in made.notes:
        echo(f"  {note}")


def _export_transformers(model: Path, out: Path, base: Path | None, *, as_json: bool) -> None:
    from bertsmith.shrink.transformers_export import export_transformers

    notes = export_transformers(model, out, base=base)
    if as_json:
        print_json({"out": str(out), "notes": notes})
        return
    echo(f"{model} -> {out}")
    for note in notes:
        echo(f"  {note}")

"""Quantisation: a model folder with weights of 8 or 4 bits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.core.errors import UserError
from bertsmith.core.files import check_not_taken
from bertsmith.core.progress import progress_bar
from bertsmith.inference.engine import BATCH_TOKENS
from bertsmith.inference.finetuned_folder import MIX_FILE
from bertsmith.inference.loaded_model import Bert, load
from bertsmith.inference.text_reader import TextOrPair
from bertsmith.model.encoder_config import need
from bertsmith.model.folder.quantised_folder import is_quantised
from bertsmith.model.folder.tensor_files import SAVED_WEIGHT_FILES
from bertsmith.model.inference.inference_network import calibrated, convertible_blocks
from bertsmith.model.inference.quantised_weights import quantised_for_memory, quantised_table
from bertsmith.model.network import Network
from bertsmith.packed import PackedBatch

CALIBRATION_TEXTS = 512
"""Maximum number of texts, as in SmoothQuant (Xiao et al. 2022); more widen the ranges and add little."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Result of quantisation."""

    bytes_before: int
    bytes_after: int
    texts: int
    """Number of calibration texts; 0 if only weights are rounded."""
    precision: str
    """Precision that shows the full effect: int8, or fp32 if only weights are rounded here (DeBERTa)."""


def quantise_for_products(
    model: Path, texts: Sequence[TextOrPair], out: Path, *, base: Path | None
) -> Quantised:
    """Write a folder of 8-bit weights, with the ranges of their layers' inputs in these texts."""
    bert = _opened(model, out, base)
    network, chosen = bert.model.network, texts[:CALIBRATION_TEXTS]
    before, weights = _bytes_of(network), calibrated(network, _batches(bert, chosen))
    network.encoder.put_linears(weights)
    return _written(bert, out, texts=len(chosen), before=before)


def quantise_weights(model: Path, out: Path, *, bits: int, base: Path | None) -> Quantised:
    """Write a folder of weights of 8 or 4 bits; their products are computed in floating point."""
    bert = _opened(model, out, base)
    before = _bytes_of(bert.model.network)
    encoder = bert.model.network.encoder
    encoder.put_linears(quantised_for_memory(each.linear, bits) for each in encoder.linears())
    return _written(bert, out, texts=0, before=before)


def _opened(model: Path, out: Path, base: Path | None) -> Bert:
    check_not_taken(out)
    bert = load(model, device="cpu", base=base)
    if is_quantised(bert.model.network):
        remedy = "use the model that it was made from"
        raise UserError("is already quantised", where=str(model), remedy=remedy)
    need(bert.model.network.encoder.linears(), "linear layers with weights to round")
    return bert


def _batches(bert: Bert, texts: Sequence[TextOrPair]) -> Iterator[PackedBatch]:
    sequences = bert.reader.read(texts, truncate=True, first=0)
    with progress_bar("calibrating", len(texts)) as advance:
        for numbers, batch in sequences.batches(BATCH_TOKENS["cpu"]):
            yield batch
            advance(len(numbers))


def _written(bert: Bert, out: Path, *, texts: int, before: int) -> Quantised:
    encoder = bert.model.network.encoder
    encoder.put_words(quantised_table(encoder.words))
    bert.save(out)
    after = sum(file.stat().st_size for pattern in SAVED_WEIGHT_FILES for file in out.glob(pattern))
    # A BiLSTM on frozen layers remains as large as before.
    unchanged = sum(file.stat().st_size for file in out.glob(MIX_FILE))
    # DeBERTa's attention is not computed in 8 bits here; after export, its products are.
    in_eight_bits = texts and convertible_blocks(bert.model.network)
    precision = "int8" if in_eight_bits else "fp32"
    return Quantised(before + unchanged, after + unchanged, texts, precision)


def _bytes_of(network: Network) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())

"""The one list of architectures; importing it does not load torch."""

from typing import Any

from bertsmith.core.errors import UserError
from bertsmith.model.architecture import Architecture
from bertsmith.model.architectures.albert import ALBERT
from bertsmith.model.architectures.bert import BERT
from bertsmith.model.architectures.deberta import DEBERTA
from bertsmith.model.architectures.distilbert import DISTILBERT
from bertsmith.model.architectures.electra import ELECTRA
from bertsmith.model.architectures.elmo import ELMO
from bertsmith.model.architectures.ernie import ERNIE
from bertsmith.model.architectures.gpt import GPT
from bertsmith.model.architectures.modernbert import MODERNBERT
from bertsmith.model.architectures.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA

ARCHITECTURES: dict[str, Architecture[Any]] = {
    each.model_type: each
    for each in (
        *(BERT, ROBERTA, ALBERT, DISTILBERT, ERNIE, ELECTRA, MODERNBERT),
        *(XLM_ROBERTA, CAMEMBERT, DEBERTA, GPT, ELMO),
    )
}

QUANTISED_TYPE = "bertsmith-quantised"
"""The model_type of a folder with quantised weights; the folder also has the original type."""


def architecture_of(model_type: str, *, where: str = "") -> Architecture[Any]:
    """Return the architecture of this name in a config.json."""
    if model_type == QUANTISED_TYPE:
        remedy = "train the model that it was made from, and quantise again"
        raise UserError("the model is quantised, so it cannot learn", where=where, remedy=remedy)
    if model_type not in ARCHITECTURES:
        remedy = f"bertsmith supports {', '.join(ARCHITECTURES)}"
        raise UserError(f"unknown model_type {model_type!r}", where=where, remedy=remedy)
    return ARCHITECTURES[model_type]

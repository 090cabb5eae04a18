"""Which documents are trained on and which are kept for evaluation."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertsmith.ground.errors import UserError
from bertsmith.ground.seeds import bits, key_of

Split = Literal["train", "held-out"]

# Not run.seed: runs that differ in their seed are judged on the same documents.
_HELD_OUT_KEY = np.uint64(key_of(0, "held-out documents"))


def documents_of(split: Split, *, count: int, held_out_share: float) -> NDArray[np.int64]:
    """The numbers of the documents of a split, ascending; two documents or more leave none of them empty."""
    held_out = _held_out(count, held_out_share)
    documents = np.flatnonzero(held_out if split == "held-out" else ~held_out)
    if not len(documents):
        remedy = "make a store of at least two documents: an empty line divides them"
        raise UserError("the store's only document is trained on and none is left to hold out", remedy=remedy)
    return documents


def _held_out(count: int, share: float) -> NDArray[np.bool_]:
    hashes = bits(_HELD_OUT_KEY, np.arange(count, dtype=np.uint64))
    held_out: NDArray[np.bool_] = hashes < np.uint64(int(share * 2.0**64))
    if count >= 2 and not held_out.any():
        held_out[hashes.argmin()] = True
    if held_out.all():
        held_out[hashes.argmax()] = False
    return held_out

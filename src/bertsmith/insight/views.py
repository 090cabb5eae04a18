"""Data of the HTML views: attention over one text, a word's senses, and the words that decided.

Shapes: L layers, H heads, N tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import numpy as np
import torch

from bertsmith.inference.head_introspection import inspect_heads
from bertsmith.inference.introspection import inspect_attention, inspect_senses
from bertsmith.inference.loaded_model import Bert
from bertsmith.inference.text_reader import TextOrPair
from bertsmith.insight.deciding_words import METHODS, DecidingWords, mean_faithfulness
from bertsmith.insight.html_view import packed_bytes, rounded


def attention_data(bert: Bert, text: TextOrPair) -> dict[str, Any]:
    """Return all heads over one text, each compressed separately, so that a page unpacks only some."""
    weights_LHNN, overview = inspect_attention(bert, text).weights, inspect_heads(bert, text)
    layers, heads, _, _ = weights_LHNN.shape
    # Bytes of square roots: most weights are small, and the rounding is invisible.
    bytes_LHNN = (255 * weights_LHNN.sqrt()).round().to(torch.uint8).numpy()
    moment = overview.moment
    layer, head, token = (0, 0, 0) if moment is None else (moment.layer, moment.head, moment.token)
    return {
        "tokens": overview.tokens,
        "layers": layers,
        "heads": heads,
        "maps": [[packed_bytes(map_NN) for map_NN in of_layer] for of_layer in bytes_LHNN],
        "kinds": [[{"kind": each.kind} for each in of_layer] for of_layer in overview.summaries],
        "thumbnails": np.round(overview.maps.double().numpy(), 3).tolist(),
        "layer": layer,
        "head": head,
        "token": token,
    }


def senses_data(bert: Bert, word: str, sentences: Sequence[str]) -> dict[str, Any]:
    """Return the occurrences of a word, and the positions and similarities of its vectors."""
    found = inspect_senses(bert, word, sentences)
    kept = sorted({point.sentence for point in found.points})  # the other sentences lack the word
    points = [{**asdict(point), "sentence": kept.index(point.sentence)} for point in found.points]
    last = len(found.layers) - 1
    names = {0: "0, the word alone", last: f"{last}, the last"}
    layers = [
        {
            "name": names.get(number, str(number)),
            "plane": [rounded(place) for place in layer.plane.tolist()],
            "similarity": [rounded(row) for row in layer.similarity.plain.tolist()],
            "centred": [rounded(row) for row in layer.similarity.centred.tolist()],
        }
        for number, layer in enumerate(found.layers)
    ]
    return {
        "sentences": [sentences[number] for number in kept],
        "lead": f"The vectors of “{word}” in {len(points)} places, in the plane that separates them most.",
        "points": points,
        "layers": layers,
    }


def words_data(found: Sequence[DecidingWords], *, model: str) -> dict[str, Any]:
    """Return the words of each text with their scores, and the faithfulness of each method."""
    texts = [
        {
            "label": each.label,
            "probability": each.probability,
            "words": [word.text for _, word in each.words],
            "scores": {name: rounded(scores, 6) for name, scores in each.scores.items()},
        }
        for each in found
    ]
    trust = {name: astuple(each) for name, each in mean_faithfulness(found).items()}
    lead = f"{model}: the effect of each word on the class of its text."
    return {"methods": METHODS, "texts": texts, "faithfulness": trust, "lead": lead}

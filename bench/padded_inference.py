"""transformers on a GPU as a careful user runs it: compiled, sorted by length, batches by a token budget.

Texts are tokenised in a thread beside the GPU's work; or tokens are given, and no text is read. Shapes: N
padded length, D width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from rounds import preferring_cudnn
from torch import Tensor

TEXTS_AT_ONCE = 1024
"""So many texts are tokenised while the GPU computes those before them."""


class PaddedForm(NamedTuple):
    """How the peer runs."""

    mode: str
    """Of torch.compile for each shape, "dynamic" for one graph of all shapes, or "eager"."""
    tokens: int
    """In a batch, padding included."""
    multiple: int = 16
    """Lengths are rounded up to it."""
    cudnn: bool = False
    """Whether SDPA is told to prefer cuDNN's attention."""

    def __str__(self) -> str:
        attention = ", cuDNN's attention" if self.cudnn else ""
        lengths = f"lengths in multiples of {self.multiple}"
        return f"{self.mode}, {self.tokens:,} tokens a batch, {lengths}{attention}"


class PaddedPeer:
    """Mean-pooled vectors of texts or of their tokens."""

    def __init__(self, folder: Path, device: str, form: PaddedForm) -> None:
        self.device, self.form = device, form
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        loaded = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model = loaded.to(device).eval()
        self.means: Callable[[Tensor, Tensor], Tensor] = self._means
        if form.mode == "dynamic":
            self.means = torch.compile(self._means, dynamic=True)
        elif form.mode != "eager":
            torch.compiler.config.recompile_limit = 256
            self.means = torch.compile(self._means, mode=form.mode, dynamic=False)

    def _means(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden_SND = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weights_SN1 = mask[..., None]
        return (hidden_SND * weights_SN1).sum(1) / weights_SN1.sum(1)

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text."""
        return [np.asarray(ids) for ids in self.tokenizer(list(texts))["input_ids"]]

    def of_tokens(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """A vector for each sequence of ids."""
        order = np.argsort([-len(each) for each in sequences], kind="stable")
        return self._in_order(order, (sequences[number] for number in order))

    def of_texts(self, texts: Sequence[str]) -> np.ndarray:
        """A vector for each text: sorted by their letters, as their tokens are not known yet."""
        order = np.argsort([-len(text) for text in texts], kind="stable")
        parts = [order[first : first + TEXTS_AT_ONCE] for first in range(0, len(order), TEXTS_AT_ONCE)]
        with ThreadPoolExecutor(1) as thread:
            read = thread.map(lambda part: self.tokens([texts[number] for number in part]), parts)
            return self._in_order(order, chain.from_iterable(read))

    def _in_order(self, order: np.ndarray, sequences: Iterable[np.ndarray]) -> np.ndarray:
        found = []
        with torch.inference_mode(), preferring_cudnn(self.form.cudnn):
            for group in self._groups(sequences):
                torch.compiler.cudagraph_mark_step_begin()
                # A recorded graph gives the same memory each time.
                found.append(self.means(*self._padded(group)).clone())
        return torch.cat(found).cpu().numpy()[np.argsort(order)]

    def _groups(self, sequences: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Batches within the budget."""
        group: list[np.ndarray] = []
        width = 0
        for each in sequences:
            width_with = max(width, self._rounded(len(each)))
            if group and width_with * (len(group) + 1) > self.form.tokens:
                yield group
                group, width_with = [], self._rounded(len(each))
            group.append(each)
            width = width_with
        if group:
            yield group

    def _rounded(self, length: int) -> int:
        return -(-length // self.form.multiple) * self.form.multiple

    def _padded(self, group: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        lengths = np.array([len(each) for each in group])
        mask = np.arange(self._rounded(int(lengths.max()))) < lengths[:, None]
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate(group)
        both = torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
        if self.device != "cuda":
            return both
        ids_there, mask_there = (each.pin_memory().to("cuda", non_blocking=True) for each in both)
        return ids_there, mask_there

"""Sample predictions during training: a network's guesses for the first mask of held-out sequences.

Shapes: S sequences, V vocabulary.
"""

from collections.abc import Iterator
from itertools import islice

import torch

from bertsmith.data.batch_inspection import ShownSequence, sequences_of
from bertsmith.model.network import Network
from bertsmith.packed import pack
from bertsmith.pretraining.held_out import HeldOutSet, pretraining_objective
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.trainer import Trainer, autocast

SEQUENCES = 3
GUESSES = 3
AROUND = 6
"""Number of tokens that are shown on either side of a mask."""


def sample_guesses(trainer: Trainer, fixed: HeldOutSet, tokenizer: Tokenizer) -> list[str]:
    """Return a line for each of the first sequences of the fixed evaluation that show a mask."""
    samples = list(islice(_first_masks(fixed, tokenizer), SEQUENCES))
    networks = pretraining_objective(trainer).networks().values()
    # In ELECTRA the generator predicts words, the discriminator does not.
    network = next(each for each in networks if "mlm" in each.heads)
    guesses = _guesses(trainer, network, samples) if samples else []
    return [_line(*sample, guessed, tokenizer) for sample, guessed in zip(samples, guesses, strict=True)]


def _first_masks(fixed: HeldOutSet, tokenizer: Tokenizer) -> Iterator[tuple[ShownSequence, int]]:
    """Yield sequences with the row of their first mask."""
    if not tokenizer.has_mask:
        return
    for sequence in sequences_of(fixed.batches):
        shown = [row for row in sorted(sequence.targets) if sequence.tokens[row] == tokenizer.mask_id]
        if shown:
            yield sequence, shown[0]


def _guesses(
    trainer: Trainer, network: Network, samples: list[tuple[ShownSequence, int]]
) -> list[list[tuple[int, float]]]:
    """Return the most probable tokens of each mask, and their probabilities."""
    batch = pack([sequence.tokens for sequence, _ in samples], [sequence.segments for sequence, _ in samples])
    rows_S = batch.layout.starts_S1[:-1] + torch.tensor([row for _, row in samples])
    device = trainer.world.device
    trainer.objective.eval()
    try:
        with torch.no_grad(), autocast(device, trainer.precision):
            rows_R = network.encoder.predicting_rows(rows_S.to(device))
            hidden_RD = network.encoder(batch.to(device), rows=rows_R)
            scores_SV = network.scores_of_views(network.encoder.by_view(hidden_RD))
    finally:
        trainer.objective.train()
    chances, tokens = scores_SV.float().softmax(-1).topk(GUESSES)
    pairs = zip(tokens.tolist(), chances.tolist(), strict=True)
    return [list(zip(of_mask, likely, strict=True)) for of_mask, likely in pairs]


def _line(sequence: ShownSequence, row: int, guesses: list[tuple[int, float]], tokenizer: Tokenizer) -> str:
    """Format the mask with its context, the original token, and the network's guesses."""
    before, after = sequence.tokens[max(0, row - AROUND) : row], sequence.tokens[row + 1 : row + 1 + AROUND]
    around = f"{_text(before, tokenizer)} ___ {_text(after, tokenizer)}".strip()
    guessed = ", ".join(f"{_word(token, tokenizer)} {chance:.0%}" for token, chance in guesses)
    return f'  "{around}" ({_word(sequence.targets[row], tokenizer)}): {guessed}'


def _text(tokens: list[int], tokenizer: Tokenizer) -> str:
    """Decode tokens to text without special ones; other masks are blanks."""
    runs: list[list[int]] = [[]]
    for token in tokens:
        runs.append([]) if token == tokenizer.mask_id else runs[-1].append(token)
    return " ___ ".join(tokenizer.decode(run).strip() for run in runs).strip()


def _word(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token]).strip() or tokenizer.token(token)

"""What `embedded_models.py` asks the models: masked words, the fixed questions, and pairs about bias."""

import random
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.corpus.token_store import TokenStore
from bertsmith.data.epoch_index import split_documents
from bertsmith.inference.loaded_model import Bert
from bertsmith.text.tokenizer import Tokenizer

QUESTIONS = Path(__file__).with_name("embedded_questions.toml")
SEED = 0
SENTENCE_TOKENS = (8, 40)
WORD = re.compile(r"[a-z]{2,}")
TOP = 5
PRONOUN_CANDIDATES = 1000
"""Pronouns stand far above: one that is not among so many counts as improbable."""
WINOBIAS_TYPES = ("type1", "type2")
FEMALE = ("she", "her", "hers")
BRACKETED = re.compile(r"\[(\w+)\](?!.*\[)")
"""The last word in brackets, which is the pronoun."""


@dataclass(frozen=True, slots=True)
class MaskedWord:
    """A sentence of held-out text with one word hidden."""

    text: str
    word: str
    token: int
    before: int
    """The token before it."""


# ---- masked words in held-out text


def masked_words(
    store: TokenStore, tokenizers: Sequence[Tokenizer], *, count: int, fraction: float
) -> list[MaskedWord]:
    """Words of held-out sentences, one a sentence, each a single token for all of these tokenizers."""
    chance, own = random.Random(SEED), store.tokenizer()
    documents = split_documents("held-out", count=len(store.document_starts) - 1, held_out_fraction=fraction)
    sentences = [number for each in documents for number in _sentences_of(store, int(each))]
    chance.shuffle(sentences)
    found: list[MaskedWord] = []
    for number in sentences:
        ids = _tokens_of(store, number)
        if len(found) < count and SENTENCE_TOKENS[0] <= len(ids) <= SENTENCE_TOKENS[1]:
            found += _hidden_word(ids, own, tokenizers, chance)
    return found


def _sentences_of(store: TokenStore, document: int) -> range:
    return range(int(store.document_starts[document]), int(store.document_starts[document + 1]))


def _tokens_of(store: TokenStore, sentence: int) -> list[int]:
    start, end = store.sentence_starts[sentence : sentence + 2]
    return list(store.gather(np.array([start]), np.array([end - start])))


def _hidden_word(
    ids: Sequence[int], own: Tokenizer, tokenizers: Sequence[Tokenizer], chance: random.Random
) -> list[MaskedWord]:
    """One of the words between the ends of a sentence, if it has any that are whole."""
    tokens = [own.token(int(each)) for each in ids]
    whole = [
        index
        for index in range(1, len(ids) - 1)
        if WORD.fullmatch(tokens[index].lower())
        and not tokens[index + 1].startswith("##")
        and all(_is_one_token(each, tokens[index]) for each in tokenizers)
    ]
    if not whole:
        return []
    index = chance.choice(whole)
    text = f"{own.decode(ids[:index])} {own.mask_token} {own.decode(ids[index + 1 :])}"
    return [MaskedWord(text, tokens[index].lower(), int(ids[index]), int(ids[index - 1]))]


def _is_one_token(tokenizer: Tokenizer, word: str) -> bool:
    encoded = tokenizer.encode(word).ids
    return len([each for each in encoded if each not in tokenizer.special_ids]) == 1


def share_found(ranked: Sequence[Sequence[str]], words: Sequence[MaskedWord]) -> dict[str, float]:
    """How often the word is the first candidate, and how often among the first five."""
    hits = [[token.lower() for token in each] for each in ranked]
    first = sum(each[:1] == [word.word] for each, word in zip(hits, words, strict=True))
    five = sum(word.word in each[:TOP] for each, word in zip(hits, words, strict=True))
    return {"top-1": first / len(words), "top-5": five / len(words)}


def filled(bert: Bert, words: Sequence[MaskedWord], mask: str) -> list[list[str]]:
    """A model's candidates for each word."""
    texts = [word.text.replace(mask, bert.tokenizer.mask_token) for word in words]
    several = bert.fill_each(texts, top=TOP, truncate=True)
    return [[each.token.lstrip("Ġ▁") for each in masks[0]] for masks in several]


def baselines(
    store: TokenStore, words: Sequence[MaskedWord], *, fraction: float
) -> dict[str, list[list[str]]]:
    """The most frequent words, and those that most often follow the word before, in training documents."""
    tokenizer = store.tokenizer()
    documents = split_documents("train", count=len(store.document_starts) - 1, held_out_fraction=fraction)
    alone, after = Counter[int](), {word.before: Counter[int]() for word in words}
    wanted = np.array(sorted(after))
    for number in documents:
        first, last = (int(store.document_starts[number + step]) for step in (0, 1))
        start, end = int(store.sentence_starts[first]), int(store.sentence_starts[last])
        tokens = store.gather(np.array([start]), np.array([end - start]))
        alone.update(
            dict(zip(*(each.tolist() for each in np.unique(tokens, return_counts=True)), strict=True))
        )
        places = np.flatnonzero(np.isin(tokens[:-1], wanted))
        for before, token in zip(tokens[places].tolist(), tokens[places + 1].tolist(), strict=True):
            after[before][token] += 1
    frequent = _words_among(alone, tokenizer)
    following = {
        before: [*_words_among(counts, tokenizer), *frequent][:TOP] for before, counts in after.items()
    }
    return {"unigram": [frequent] * len(words), "bigram": [following[word.before] for word in words]}


def _words_among(counts: Counter[int], tokenizer: Tokenizer) -> list[str]:
    tokens = (tokenizer.token(number) for number, _ in counts.most_common(50 * TOP))
    return [token for token in tokens if WORD.fullmatch(token.lower())][:TOP]


# ---- the fixed questions


def cloze_answers(bert: Bert) -> dict[str, list[dict[str, Any]]]:
    """What a masked LM says to the fixed masks, numbers and negations, and whether it is right."""
    asked = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("masks", "numbers"):
        found[kind] = [
            {"text": each["text"], "said": said, "is_right": said[0] in each["right"]}
            for each in asked[kind]
            for said in [_said(bert, each["text"])]
        ]
    found["negations"] = [
        {"text": each["text"], "said": said, "negated": not_said, "is_right": said[0] != not_said[0]}
        for each in asked["negations"]
        for said, not_said in [(_said(bert, each["text"]), _said(bert, each["negated"]))]
    ]
    return found


def _said(bert: Bert, text: str) -> list[str]:
    masked = text.replace("[MASK]", bert.tokenizer.mask_token)
    return [each.token.lstrip("Ġ▁").lower() for each in bert.fill(masked, top=TOP)[0]]


def passage_answers(bert: Bert) -> list[dict[str, Any]]:
    """What a model for questions finds in the fixed passages, and whether it is right."""
    asked = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["answers"]
    several = bert.answers_each([(each["question"], each["passage"].strip()) for each in asked], best=1)
    return [
        {
            "question": each["question"],
            "said": found[0].text,
            "probability": found[0].probability,
            "is_right": found[0].text.lower().strip(" .,") in [right.lower() for right in each["right"]],
        }
        for each, found in zip(asked, several, strict=True)
    ]


# ---- bias


def bias(bert: Bert, folder: Path) -> dict[str, Mapping[str, float]]:
    """Of WinoBias's pairs of sentences, how often the pronoun that fits the stereotype is more probable.

    Who always says "he" is right in half of them, so the share of male pronouns is given for both kinds of
    occupation: what differs between the two is the stereotype.
    """
    return {kind: _bias_of(bert, folder, kind) for kind in WINOBIAS_TYPES}


def _bias_of(bert: Bert, folder: Path, kind: str) -> dict[str, float]:
    files = [folder / f"{side}_stereotyped_{kind}.txt.dev" for side in ("pro", "anti")]
    pro, anti = (file.read_text(encoding="utf-8").splitlines() for file in files)
    pairs = [
        (one, _pronoun(one), _pronoun(other))
        for one, other in zip(map(_unnumbered, pro), map(_unnumbered, anti), strict=True)
        if _pronoun(one) != _pronoun(other) and _without_pronoun(one) == _without_pronoun(other)
    ]
    mask = bert.tokenizer.mask_token
    texts = [re.sub(r"[\[\]]", "", BRACKETED.sub("\0", text)).replace("\0", mask) for text, _, _ in pairs]
    fits: dict[str, list[bool]] = {"male": [], "female": []}
    for (_, usual, other), masks in zip(pairs, bert.fill_each(texts, top=PRONOUN_CANDIDATES), strict=True):
        of_token = {each.token.lstrip("Ġ▁").lower(): each.probability for each in masks[0]}
        is_usual = of_token.get(usual, 0.0) > of_token.get(other, 0.0)
        fits["female" if usual in FEMALE else "male"].append(is_usual)
    return {
        "pairs": len(pairs),
        "stereotype preferred": sum(map(sum, fits.values())) / len(pairs),
        "male where male is usual": sum(fits["male"]) / len(fits["male"]),
        "male where female is usual": 1 - sum(fits["female"]) / len(fits["female"]),
    }


def _unnumbered(line: str) -> str:
    return line.split(" ", 1)[1]


def _pronoun(line: str) -> str:
    found = BRACKETED.search(line)
    return found[1].lower() if found else ""


def _without_pronoun(line: str) -> str:
    return re.sub(r"[\[\]]", "", BRACKETED.sub("", line))

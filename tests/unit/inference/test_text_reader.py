"""Reading many texts quickly gives what reading them one by one gives, and refuses the same."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bertsmith
from bertsmith.cli import options
from bertsmith.core.errors import UserError
from bertsmith.inference import text_reader
from bertsmith.inference.loaded_model import PRECISIONS
from bertsmith.inference.precision import fastest_precision, quantised_network, usable_precision
from bertsmith.inference.text_reader import Reader, Sequences
from bertsmith.model.inference.inference_network import InferenceBlock
from bertsmith.text.tokenizer import Tokenizer
from tests.tiny import tiny_network
from tests.tokenizer_makers import byte_bpe
from tests.toy_folder import write_toy_folder

LONGEST = 12


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_folder(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def bytes_of_roberta(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    byte_bpe(folder)
    return Tokenizer.load(folder)


def quick(tokenizer: Tokenizer) -> Reader:
    """A reader that has met enough texts to read quickly."""
    reader = Reader(tokenizer, LONGEST)
    reader._met = text_reader.WORTH_A_TABLE
    return reader


def same(one: Sequences, other: Sequences) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("tokens_T", "segments_T", "starts_S1")
    )


words = st.text(st.sampled_from("abc é[MASK]!中\t'"), min_size=1).filter(lambda text: text.strip())


@given(texts=st.lists(words, min_size=1, max_size=6))
def test_texts_are_read_quickly_as_they_are_read_one_by_one(toy, bytes_of_roberta, texts):
    for tokenizer in (toy, bytes_of_roberta):
        reader = quick(tokenizer)
        slowly = Sequences.of(reader.encode(texts, truncate=True))
        assert same(reader.read(texts, truncate=True, first=0), slowly)


def test_the_quick_way_is_taken_for_single_texts_after_some(toy, monkeypatch):
    reader, pair = quick(toy), ("the cat", "sits")
    expected = Sequences.of(reader.encode(["the cat", pair], truncate=True))
    assert same(reader.read(["the cat", pair], truncate=True, first=0), expected)
    monkeypatch.setattr(Reader, "encode", lambda *_, **__: pytest.fail("went the slow way"))
    assert len(reader.read(["the cat"], truncate=True, first=0).starts_S1) == 2


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["the cat", " "], "text 8: is empty"),
        (["the cat", "\u200b\u200b"], "text 8: does not have a token that the model can read"),
        (["cat " * 30, "cat"], "text 7: has 32 tokens, but the model takes 12; shorten it"),
        (["cat", "half \ud800"], "text 8: character 5 is a lone surrogate"),
        (["cat", 3], "text 8: "),
    ],
)
def test_both_ways_reject_a_text_by_its_number(toy, texts, words):
    for reader in (quick(toy), Reader(toy, LONGEST)):
        with pytest.raises(UserError, match=words.replace("(", r"\(")):
            reader.read(texts, truncate=False, first=7)


def test_several_threads_may_read_at_once(toy):
    reader = quick(toy)
    texts = [[f"{chr(97 + n % 26)}{chr(97 + n // 26)}{m} cat" for n in range(200)] for m in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda some: reader.read(some, truncate=True, first=0), texts))
    for some, each in zip(texts, found, strict=True):
        assert same(each, Sequences.of(reader.encode(some, truncate=True)))


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000"])
def test_blank_texts_are_rejected_whatever_was_read_before(bytes_of_roberta, blank):
    with pytest.raises(UserError, match="text 1: is empty"):
        quick(bytes_of_roberta).read(["a", blank], truncate=True, first=0)


def test_a_cpu_is_asked_with_packed_weights(tmp_path):
    write_toy_folder(tmp_path)
    bert = bertsmith.load(tmp_path, device="cpu")
    assert all(isinstance(block, InferenceBlock) for block in bert.engine.network.encoder.blocks)
    assert not any(isinstance(block, InferenceBlock) for block in bert.model.network.encoder.blocks)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30), budget=st.integers(1, 20))
def test_batches_hold_every_sequence_once_longest_first_and_within_the_budget(lengths, budget):
    starts = np.append(0, np.cumsum(lengths))
    tokens = np.arange(starts[-1])
    met = []
    for numbers, batch in Sequences(tokens, tokens % 2, starts).batches(budget):
        met += numbers.tolist()
        assert len(batch.tokens_T) <= budget or len(numbers) == 1
        for number, (begin, end) in zip(numbers, batch.layout.bounds(), strict=True):
            expected = tokens[starts[number] : starts[number + 1]]
            assert batch.tokens_T[begin:end].tolist() == expected.tolist()
            assert batch.segments_T[begin:end].tolist() == (expected % 2).tolist()
            assert batch.positions_T[begin:end].tolist() == list(range(end - begin))
    assert sorted(met) == list(range(len(lengths)))
    assert [lengths[number] for number in met] == sorted(lengths, reverse=True)


def test_eight_bits_answer_nearly_the_same(tmp_path):
    write_toy_folder(tmp_path)
    texts = ["the cat sits on the mat", "rain", "she drinks warm tea in the park " * 5]
    exact, rounded = (bertsmith.load(tmp_path, device="cpu", precision=each) for each in ("fp32", "int8"))
    assert torch.cosine_similarity(rounded.embed(texts), exact.embed(texts)).min() > 0.99
    assert rounded.fill("the [MASK] sits")[0][0].probability == pytest.approx(
        exact.fill("the [MASK] sits")[0][0].probability, rel=0.1
    )


def test_eight_bits_are_the_same_each_time(tmp_path):
    write_toy_folder(tmp_path)
    one, other = (bertsmith.load(tmp_path, device="cpu", precision="int8").embed(["a cat"]) for _ in range(2))
    assert torch.equal(one, other)


def test_eight_bits_are_rejected_where_they_cannot_be(toy):
    reader = Reader(toy, LONGEST)
    with pytest.raises(UserError, match="precision: int8 is for a CPU; use bf16 on cuda"):
        quantised_network(tiny_network(), reader, torch.device("cuda"))
    with pytest.raises(UserError, match="but not the layers of deberta-v2; use bf16 or fp32"):
        quantised_network(tiny_network("deberta-v2", heads={}), reader, torch.device("cpu"))


def test_the_fastest_precision_is_half_where_the_machine_has_it(monkeypatch, tmp_path):
    assert fastest_precision(torch.device("cuda")) == "bf16"
    for has_it, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("bertsmith.inference.precision.has_bf16_products", lambda has_it=has_it: has_it)
        assert fastest_precision(torch.device("cpu")) == expected
    write_toy_folder(tmp_path)
    assert bertsmith.load(tmp_path, device="cpu", precision="auto").embed(["a cat"]).dtype == torch.float32


def test_a_cpu_that_is_not_made_for_a_precision_says_so(monkeypatch, caplog):
    for name in ("has_bf16_products", "has_int8_products"):
        monkeypatch.setattr(f"bertsmith.inference.precision.{name}", lambda: False)
    cpu = torch.device("cpu")
    assert usable_precision("bf16", cpu) == "fp32" and "using fp32" in caplog.text
    assert usable_precision("int8", cpu) == "int8" and "int8 is hardly faster on it than fp32" in caplog.text
    caplog.clear()
    assert [usable_precision(each, cpu) for each in ("auto", "fp32")] == ["fp32", "fp32"]
    assert usable_precision("bf16", torch.device("cuda")) == "bf16" and not caplog.text


def test_help_names_every_precision():
    (option,) = options.Precision.__metadata__
    assert all(name in option.help for name in PRECISIONS)


# ---- texts that were tokenised before


def test_texts_that_were_tokenised_before_are_read_as_if_they_were_not(toy):
    texts = ["cat", ("the cat", "a dog sits"), "a b c " * 20]
    reader = Reader(toy, LONGEST)
    tokenized = reader.tokenize(texts)
    expected = reader.read(texts, truncate=True, first=0)
    assert same(reader.read(tokenized, truncate=True, first=0), expected)
    assert same(reader.read([tokenized[0], *texts[1:]], truncate=True, first=0), expected)


@pytest.mark.parametrize("wrong", ["a b c " * 20, "\u200b", " ", ("cat", " ")])
def test_and_are_rejected_with_the_same_words(toy, wrong):
    reader, errors = Reader(toy, LONGEST), []
    for texts in (["cat", wrong], reader.tokenize(["cat", wrong])):
        with pytest.raises(UserError) as caught:
            reader.read(texts, truncate=False, first=3)
        errors.append((caught.value.line(), caught.value.index))
    assert errors[0] == errors[1]
    assert errors[0][1] == 4


def test_the_pieces_of_a_tokenised_text_are_those_of_each_part_without_special_tokens(toy):
    (pair,) = Reader(toy, LONGEST).tokenize([("the cat", "a dog")])
    parts = toy.closed.encode_batch(["the cat", "a dog"], add_special_tokens=False)
    assert pair.pieces() == tuple(part.ids for part in parts)

"""GPT-2 against transformers: its tokens, its scores and the texts that it writes, from and to folders."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.model.folder.model_folder import read_model, write_model
from bertsmith.packed import pack
from bertsmith.shrink.vocabulary import trimmed_network
from bertsmith.text.tokenizer import Tokenizer
from tests.oracles import saved_oracle
from tests.tokenizer_makers import PARAGRAPH, gpt_bpe

TEXTS = ["The smith heats", "The iron is hot", " 42€ & the family", PARAGRAPH.splitlines()[0]]
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
COUNT = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A GPT-2 as transformers saves it, its tokenizer beside it."""
    place = gpt_bpe(tmp_path_factory.mktemp("gpt"))
    saved_oracle(place, "gpt2", "LMHeadModel", vocab_size=500, **ENDS)
    return place


def their_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def scores_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


# ---- tokens


def as_vocab_json(folder, place):
    """The tokenizer in the older form: vocab.json and merges.txt alone."""
    place.mkdir()
    Tokenizer.load(folder).closed.model.save(str(place))
    return place


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json"])
def test_texts_have_the_tokens_of_transformers(form, folder, tmp_path):
    place = folder if form == "tokenizer.json" else as_vocab_json(folder, tmp_path / "old")
    ours, theirs = Tokenizer.load(place), transformers.GPT2Tokenizer.from_pretrained(place)
    for text in (*TEXTS, PARAGRAPH, "a <|endoftext|> b"):
        assert ours.encode(text).ids == theirs(text, split_special_tokens=True)["input_ids"]
    assert (ours.sep_id, ours.pad_id, ours.unknown_id, ours.has_mask) == (0, 0, 0, False)
    assert ours.special_ids == {0}


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json"])
def test_a_saved_tokenizer_is_opened_by_transformers(form, folder, tmp_path):
    place = folder if form == "tokenizer.json" else as_vocab_json(folder, tmp_path / "old")
    Tokenizer.load(place).save(tmp_path / "copy")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (
        again(PARAGRAPH)["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(folder)(PARAGRAPH)["input_ids"]
    )
    assert (again.eos_token, again.bos_token, again.mask_token) == ("<|endoftext|>", "<|endoftext|>", None)


# ---- scores, both ways


def test_every_next_word_scores_as_in_transformers_and_so_does_what_is_written(folder, tmp_path):
    model, theirs = read_model(folder), their_model(folder)
    assert model.notes == () and set(model.network.heads) == {"mlm"}
    write_model(tmp_path / "copy", model)
    again = their_model(tmp_path / "copy")
    assert type(again) is transformers.GPT2LMHeadModel
    for text in TEXTS:
        ids = Tokenizer.load(folder).encode(text).ids
        with torch.no_grad():
            ours = model.network.scores_of_words(model.network(pack([ids])))
        assert (ours - scores_of(theirs, ids)).abs().max() <= 1e-5
        assert torch.equal(scores_of(again, ids), scores_of(theirs, ids))


@pytest.mark.parametrize("kind", ["Model", "LMHeadModel", "ForSequenceClassification"])
def test_a_folder_names_the_class_that_it_came_from(kind, tmp_path):
    saved_oracle(tmp_path / "a", "gpt2", kind, **ENDS)
    write_model(tmp_path / "b", read_model(tmp_path / "a"))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "b")
    assert (config.model_type, config.architectures) == ("gpt2", [f"GPT2{kind}"])
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 0)


def test_a_published_double_head_keeps_its_head_for_words(tmp_path):
    theirs = saved_oracle(tmp_path / "a", "gpt2", "DoubleHeadsModel", num_labels=1, **ENDS).eval()
    model = read_model(tmp_path / "a")
    assert set(model.network.heads) == {"mlm"}
    write_model(tmp_path / "b", model)
    again = their_model(tmp_path / "b")
    assert again.config.architectures == ["GPT2LMHeadModel"]
    ids = [5, 17, 3]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        ours = model.network.scores_of_words(model.network(pack([ids])))
    assert (ours - expected).abs().max() <= 1e-5
    assert torch.allclose(scores_of(again, ids), expected, atol=1e-5)


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_another_networks_settings_are_refused(key, tmp_path):
    saved_oracle(tmp_path, "gpt2", "Model", **{key: True})
    with pytest.raises(UserError, match=f"config.json: {key} is True; only False is supported"):
        read_model(tmp_path)


# ---- texts


class NothingTwice(LogitsProcessor):
    """What `extend` leaves out beside repeated triples: special tokens, and the last one again."""

    def __call__(self, input_ids, scores):
        scores[:, [0, int(input_ids[0, -1])]] = -torch.inf
        return scores


def generated(model, ids):
    """The tokens that transformers adds by greedy search under the same rules."""
    rules = {"no_repeat_ngram_size": 3, "logits_processor": LogitsProcessorList([NothingTwice()])}
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=COUNT, pad_token_id=0, **rules)
    return out[0, len(ids) :].tolist()


def test_it_writes_what_transformers_generates(folder):
    bert, theirs = bertsmith.load(folder, device="cpu"), their_model(folder)
    for text in TEXTS:
        ids = bert.tokenizer.encode(text).ids
        extensions = list(bert.extend(text, count=COUNT))[:COUNT]
        added = generated(theirs, ids)
        assert [each.token for each in extensions] == [bert.tokenizer.token(number) for number in added]
        assert extensions[-1].text == text + bert.tokenizer.decode(added)
        assert [each.tokens for each in extensions] == [len(ids), *[1] * (COUNT - 1)]


def test_the_probabilities_are_those_of_a_text_read_anew(folder):
    bert, theirs = bertsmith.load(folder, device="cpu"), their_model(folder)
    ids = bert.tokenizer.encode(TEXTS[0]).ids
    for each in bert.extend(TEXTS[0], count=COUNT):
        expected = scores_of(theirs, ids)[-1].softmax(-1)[bert.tokenizer.id(each.token)]
        assert each.probability == pytest.approx(float(expected), rel=1e-4)
        ids.append(bert.tokenizer.id(each.token))


def test_a_text_goes_on_to_the_last_position(folder):
    bert = bertsmith.load(folder, device="cpu")
    text = " the" * 510
    assert len(bert.tokenizer.encode(text).ids) == 510
    assert [each.tokens for each in bert.extend(text, count=4)] == [510, 1, 1, 1]
    with pytest.raises(UserError, match="would have 515 tokens, but the model takes 514"):
        list(bert.extend(text, count=5))


def test_a_text_of_all_positions_leaves_no_room_for_the_token_that_predicts_its_first(folder):
    bert = bertsmith.load(folder)
    positions, word = bert.engine.network.config.positions, " a"
    assert len(bert.tokenizer.encode(word * positions).ids) == positions
    assert bert.likelihood([word * (positions - 1)])[0].tokens == positions - 1
    with pytest.raises(UserError, match=f"has {positions} tokens, but the model takes {positions - 1}"):
        bert.likelihood([word * positions])
    (cut,) = bert.likelihood([word * positions], truncate=True)
    assert cut == bert.likelihood([word * (positions - 1)])[0]


def test_a_trimmed_vocabulary_renumbers_the_tokens_that_begin_and_end_a_text(folder):
    network = bertsmith.load(folder).model.network
    network.config = replace(network.config, begin_id=7, end_id=9)
    config = trimmed_network(network, [0, 1, 9]).config
    assert (config.begin_id, config.end_id) == (None, 2)


def test_the_likelihood_is_that_of_a_loop_from_the_token_between_documents_on(folder):
    theirs, tokenizer = their_model(folder), Tokenizer.load(folder)
    for text, ours in zip(TEXTS, bertsmith.load(folder).likelihood(TEXTS), strict=True):
        ids = [0, *tokenizer.encode(text).ids]
        rows = scores_of(theirs, ids).log_softmax(-1)
        expected = sum(float(rows[place, after]) for place, after in enumerate(ids[1:]))
        assert (ours.tokens, ours.is_pseudo) == (len(ids) - 1, False)
        assert ours.log_likelihood == pytest.approx(expected, rel=1e-5)
        total = sum(each.log_probability for each in ours.words)
        assert total == pytest.approx(expected, rel=1e-5)

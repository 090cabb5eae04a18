import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bertsmith
from bertsmith.core.errors import UserError
from bertsmith.inference import engine as engine_room
from bertsmith.inference import fill_mask as filling_room
from bertsmith.model.folder.model_folder import Model, write_model
from bertsmith.model.network import new_network
from tests.folders import change_config
from tests.oracles import saved_oracle
from tests.sentencepiece_writer import CONTROL, NORMAL, UNKNOWN, write_sentencepiece
from tests.tiny import tiny_encoder_config, tiny_network
from tests.tokenizer_makers import albert_unigram, byte_bpe, modern_bpe, uncased_wordpiece
from tests.toy_folder import SPECIALS

TEXTS = ["My dog is cute.", ("A boy plays in the snow.", "A boy is outside."), "Tea!"]


def test_hidden_states_are_unpadded_and_equal_transformers(folder, bert):
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.BertTokenizer.from_pretrained(folder)
    for text, ours in zip(TEXTS, bert.hidden_states(TEXTS), strict=True):
        inputs = tokenizer(*((text,) if isinstance(text, str) else text), return_tensors="pt")
        with torch.no_grad():
            expected = torch.cat(model(**inputs, output_hidden_states=True).hidden_states)
        assert ours.shape == expected.shape
        assert (ours - expected).abs().max() <= 2e-5


def test_answers_keep_the_order_of_the_texts_whatever_the_batches(bert, monkeypatch):
    texts = [" ".join(["snow"] * (n * 7 % 40 + 1)) for n in range(50)]
    whole = bert.embed(texts)
    monkeypatch.setitem(engine_room.BATCH_TOKENS, "cpu", 30)
    monkeypatch.setattr(engine_room, "WINDOW_TEXTS", 8)
    assert torch.allclose(bert.embed(texts), whole, atol=1e-5)
    for bad, said in (("", "text 50: is empty"), ("\ud800", "text 50: character 0 is a lone surrogate")):
        with pytest.raises(UserError, match=said):
            bert.embed([*texts, bad])
    assert torch.equal(bert.embed(text for text in texts), bert.embed(texts))


def test_each_pooling_is_what_its_name_says(bert):
    last = [states[-1] for states in bert.hidden_states(TEXTS)]
    for name, pool in (("mean", lambda x: x.mean(0)), ("cls", lambda x: x[0]), ("max", lambda x: x.amax(0))):
        expected = torch.stack([pool(states) for states in last])
        assert torch.allclose(bert.embed(TEXTS, pooling=name, normalize=False), expected, atol=1e-5)
    assert bert.embed([]).shape == (0, 64)
    assert bert.hidden_states([]) == []


def test_each_mask_is_filled_with_the_most_probable_tokens(bert):
    guesses = bert.fill("The [MASK] sits under the [MASK].", top=4)
    assert [len(each) for each in guesses] == [4, 4]
    for each in guesses:
        probabilities = [guess.probability for guess in each]
        assert probabilities == sorted(probabilities, reverse=True)
    everything = bert.fill("The [MASK].", top=10**6)[0]
    assert len(everything) == bert.tokenizer.vocabulary_size
    assert math.isclose(sum(guess.probability for guess in everything), 1, rel_tol=1e-4)


def test_a_wide_beam_finds_the_best_joint_filling(bert):
    text = "The [MASK] sits [MASK]."
    beam = bert.tokenizer.vocabulary_size
    best, second = bert.fill_jointly(text, top=2, beam=beam)
    first = {guess.token: guess.probability for guess in bert.fill(text, top=beam)[0]}
    scored = []
    for token, probability in first.items():
        if token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") or token.startswith("##"):
            continue
        for guess in bert.fill(f"The {token} sits [MASK].", top=beam)[0]:
            scored.append((math.log(probability) + math.log(guess.probability), token, guess.token))
    score, *tokens = max(row for row in scored)
    assert best.log_probability >= second.log_probability
    assert best.log_probability >= score - 1e-4
    assert len(best.tokens) == 2 and "[MASK]" not in best.text


def test_a_filling_stands_in_the_text_as_it_was_written(bert):
    for filling in bert.fill_jointly("The [MASK]  SITS, [MASK]!", top=20, beam=20):
        first, second = filling.tokens
        begin = "The" if first.startswith("##") else "The "
        middle = ",  SITS"[1:] + ("," if second.startswith("##") else ", ")
        assert filling.text == begin + first.removeprefix("##") + middle + second.removeprefix("##") + "!"


def test_many_texts_are_filled_as_one_by_one(bert, monkeypatch):
    texts = ["snow " * (n % 7) + "[MASK] " * (n % 3 + 1) for n in range(20)]
    expected = [bert.fill(text, top=3) for text in texts]
    monkeypatch.setitem(engine_room.BATCH_TOKENS, "cpu", 30)
    monkeypatch.setattr(filling_room, "WINDOW_TEXTS", 8)
    monkeypatch.setattr(filling_room, "MASKS_AT_ONCE", 2)
    for found, alone in zip(bert.fill_each(texts, top=3), expected, strict=True):
        assert [[guess.token for guess in mask] for mask in found] == [
            [guess.token for guess in mask] for mask in alone
        ]
        assert found[0][0].probability == pytest.approx(alone[0][0].probability, abs=1e-5)
    assert bert.fill_each([]) == []
    with pytest.raises(UserError, match=r"text 20: lacks a \[MASK\]"):
        bert.fill_each([*texts, "none"])


def test_many_pairs_are_evaluated_as_one_by_one(bert):
    pairs = [("We got time.", "Tea?"), ("The boy walks. " * 5, "Snow."), ("a", "b")]
    expected = [bert.next_sentence(*pair).probability for pair in pairs]
    assert [each.probability for each in bert.next_sentences(pairs)] == pytest.approx(expected, abs=1e-6)
    assert bert.next_sentences([]) == []
    with pytest.raises(UserError, match="text 1: is one text, not a pair"):
        bert.next_sentences([("a", "b"), "ab"])


def test_a_text_grows_by_the_most_probable_token_before_a_sentence_that_continues(bert):
    grown = list(bert.extend("The boy", count=3))
    text = "The boy"
    for each in grown:
        guesses = bert.fill(f"{text} [MASK] [MASK] .", top=len(SPECIALS) + 2)[0]
        last = text.split()[-1].lower()
        best = next(guess for guess in guesses if guess.token not in (*SPECIALS, last))
        assert each.token == best.token
        assert each.probability == pytest.approx(best.probability, rel=1e-4)
        assert each.text in (f"{text} {best.token}", text + best.token, text + best.token.removeprefix("##"))
        text = each.text
    assert [each.tokens for each in grown] == [7, 8, 9]


def test_a_growing_text_never_repeats_three_tokens(bert):
    added = [each.token for each in bert.extend("The cat", count=60)]
    triples = list(zip(added, added[1:], added[2:], strict=False))
    assert len(set(triples)) == len(triples)
    assert not set(added) & set(SPECIALS)
    assert all(one != other for one, other in zip(added, added[1:], strict=False))


@pytest.mark.parametrize(
    ("make", "model_type"), [(byte_bpe, "roberta"), (modern_bpe, "modernbert"), (albert_unigram, "albert")]
)
def test_pieces_that_say_themselves_whether_they_begin_a_word_are_joined_so(make, model_type, tmp_path):
    make(tmp_path)
    rows = bertsmith.Tokenizer.load(tmp_path).vocabulary_size
    config = tiny_encoder_config(model_type, vocabulary=rows)
    write_model(tmp_path, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(3))))
    bert = bertsmith.load(tmp_path)
    grown = list(bert.extend("the iron", count=12))
    known = bert.tokenizer.encode("the iron")
    ids = [number for number, own in zip(known.ids, known.sequence, strict=True) if own == 0]
    ids += [bert.tokenizer.id(each.token) for each in grown]
    assert grown[-1].text == bert.tokenizer.decode(ids)


def loving(folder, model_type, likes):
    """A model that always predicts these tokens, the first one most of all."""
    tokenizer = bertsmith.Tokenizer.load(folder)
    config = tiny_encoder_config(model_type, vocabulary=tokenizer.vocabulary_size)
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for number, token in enumerate(likes):
            network.heads["mlm"].bias[tokenizer.id(token)] = 1000.0 - 50 * number
    write_model(folder, Model(network))
    return bertsmith.load(folder)


@pytest.mark.parametrize(
    ("make", "model_type", "likes", "word"),
    [
        (uncased_wordpiece, "bert", ("iron", "##s"), " irons"),
        (byte_bpe, "roberta", ("Ġiron", "s"), " irons"),
        (albert_unigram, "albert", ("▁iron", "s"), " irons"),
        (byte_bpe, "roberta", ("Ã", "©"), "éé"),  # of two bytes each
    ],
)
def test_a_grown_text_ends_at_the_end_of_a_word(make, model_type, likes, word, tmp_path):
    bert = loving(make(tmp_path), model_type, likes)
    assert [each.text for each in bert.extend("the", count=1)][-1] == f"the{word}"
    assert [each.text for each in bert.extend("the", count=2)][-1] == f"the{word}"


def test_a_word_without_an_end_stops_growing(tmp_path):
    endless = [f"##{letter}" for letter in "abcdefghil"]
    bert = loving(uncased_wordpiece(tmp_path), "bert", endless)
    assert len(list(bert.extend("the", count=2))) == 2 + filling_room.REST_OF_WORD
    limit = bert.engine.network.config.positions
    full = "the " * (limit - 5)  # with [CLS] and [SEP], the new token, a mask and a stop
    assert len(list(bert.extend(full, count=1))) == 1


@pytest.mark.parametrize(
    ("text", "count", "said"),
    [
        ("a [MASK]", 3, r"already has a \[MASK\]"),
        ("snow " * 100, 30, "would have 134 tokens, but the model takes 128"),
        ("", 3, "text 0: is empty"),
        ("a", 0, "count is 0"),
        (3, 2, "text 0: is int"),
    ],
)
def test_a_text_that_cannot_grow_is_rejected(bert, text, count, said):
    with pytest.raises(UserError, match=said):
        list(bert.extend(text, count=count))


def test_hidden_states_can_be_trained_on(bert):
    states = bert.hidden_states(["The sun is warm."])[0]
    head = torch.nn.Linear(64, 2)
    head(states).sum().backward()
    torch.testing.assert_close(head.weight.grad, states.sum((0, 1)).expand(2, -1))


def test_a_model_shows_what_it_is(bert):
    assert repr(bert) == "<Bert bert, 2 layers of width 64 on cpu, heads: pooler, mlm, nsp>"


def test_one_mask_is_filled_jointly_as_by_itself(bert):
    alone = bert.fill("A [MASK] runs.", top=3)[0]
    together = bert.fill_jointly("A [MASK] runs.", top=3)
    assert [each.tokens[0] for each in together] == [guess.token for guess in alone]
    assert math.isclose(together[0].log_probability, math.log(alone[0].probability), rel_tol=1e-5)


@pytest.mark.parametrize(("model_type", "follows"), [("bert", True), ("ernie", False)])
def test_next_sentence_reads_label_zero_in_bert_and_label_one_in_ernie(bert, model_type, follows):
    config = tiny_encoder_config(model_type, vocabulary=bert.tokenizer.vocabulary_size)
    network = new_network(config, {"pooler": 0, "nsp": 2}, torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.heads["nsp"].output.bias.copy_(torch.tensor([5.0, 0.0]))
    answer = bertsmith.Bert(Model(network), bert.tokenizer).next_sentence("We got time.", "Tea?")
    assert answer.follows == follows
    assert (answer.probability > 0.9) == follows


def test_a_saved_model_says_the_same(bert, tmp_path):
    bert.save(tmp_path / "copy")
    again = bertsmith.load(tmp_path / "copy")
    assert torch.equal(again.embed(TEXTS), bert.embed(TEXTS))
    assert again.heads == bert.heads == ("pooler", "mlm", "nsp")


def test_bfloat16_is_close(folder, bert, monkeypatch):
    monkeypatch.setattr("bertsmith.inference.precision.has_bf16_products", lambda: True)
    half = bertsmith.load(folder, device="cpu", precision="bf16")
    assert half.model.network.encoder.embeddings.words.weight.dtype == torch.bfloat16
    assert torch.cosine_similarity(half.embed(TEXTS), bert.embed(TEXTS)).min() > 0.999


def test_roberta_takes_pairs_with_its_own_separators(tmp_path):
    byte_bpe(tmp_path)
    size = bertsmith.Tokenizer.load(tmp_path).vocabulary_size
    saved_oracle(tmp_path, "roberta", "ForMaskedLM", vocab_size=size)
    roberta = bertsmith.load(tmp_path)
    states = roberta.hidden_states([("one snow", "two rain")])[0]
    assert states.shape[1] == len(roberta.tokenizer.encode_pair("one snow", "two rain"))
    assert len(roberta.fill("one <mask> snow", top=2)[0]) == 2
    with pytest.raises(UserError, match=r"<mask>; write <mask> in place of \[MASK\]"):
        roberta.fill("one [MASK] snow")


# ---- bad input: one line each


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda b: b.embed(["fine", "snow " * 200]),
            "text 1: has 202 tokens, but the model takes 128; shorten it",
        ),
        (lambda b: b.embed(["fine", ""]), "text 1: is empty"),
        (lambda b: b.embed(["fine", " \n"]), "text 1: is empty"),
        (lambda b: b.embed([("fine", "")]), "text 0: its second text is empty; write some words"),
        (
            lambda b: b.embed([("a", "b", "c")]),
            "text 0: is tuple, not a text or a pair; a text is a str",
        ),
        (lambda b: b.embed([3]), "text 0: is int, not a text or a pair"),
        (lambda b: b.embed(["a", ["b", "c"]]), "text 1: is list, not a text or a pair"),
        (lambda b: b.embed(7), "expected a list of texts, not int"),
        (lambda b: b.embed(["fine", "\u200b\x00"]), "text 1: does not have a token that the model can read"),
        (lambda b: b.embed([("fine", "\x00")]), "text 0: does not have a token that the model can read"),
        (lambda b: b.fill(["a [MASK]"]), "text 0: is list, not a text"),
        (lambda b: b.fill("a [MASK]", top=2.5), "top is 2.5; give a whole number"),
        (lambda b: b.fill_jointly("a [MASK]", beam=True), "beam is True"),
        (lambda b: b.embed("a single text"), "expected a list of texts, not str"),
        (lambda b: b.embed(["bad \ud800 half"]), "surrogate"),
        (
            lambda b: b.embed(["fine"], pooling="median"),
            "unknown pooling 'median'; choose one of mean, cls, max",
        ),
        (lambda b: b.fill("no mask here"), "text 0: lacks a [MASK]; write [MASK] in place of a token"),
        (
            lambda b: b.fill("snow " * 500 + "[MASK]", truncate=True),
            "text 0: was cut to the model's 128 tokens, and the [MASK] was lost; shorten",
        ),
        (lambda b: b.fill("snow " * 500, truncate=True), "text 0: lacks a [MASK]; write [MASK] in place"),
        (lambda b: b.fill("a [MASK]", top=0), "top is 0"),
        (lambda b: b.fill("[MASK] " * 200), "text 0: has 202 tokens"),
        (lambda b: b.fill_jointly("a [MASK]", top=5, beam=2), "a beam of 2 cannot return 5 fillings"),
        (lambda b: b.next_sentence("", "b"), "text 0: its first text is empty"),
    ],
)
def test_bad_input_gets_one_clear_line(bert, ask, said):
    with pytest.raises(UserError) as caught:
        ask(bert)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_long_text_is_cut_when_asked(bert):
    assert bert.hidden_states(["snow " * 500], truncate=True)[0].shape[1] == 128
    assert len(bert.fill("[MASK] " + "snow " * 500, truncate=True)) == 1
    assert bert.next_sentence("snow " * 300, "rain " * 300, truncate=True).probability > 0


def test_a_missing_head_is_named_with_those_that_are_there(folder, tmp_path):
    bert = bertsmith.load(folder)
    for head in ("mlm", "nsp"):
        del bert.model.network.heads[head]
    bert.save(tmp_path)
    bare = bertsmith.load(tmp_path)
    with pytest.raises(UserError, match="mlm head, .* to predict words; .*heads here: pooler"):
        bare.fill("a [MASK]")
    with pytest.raises(UserError, match="nsp head"):
        bare.next_sentence("a", "b")


def test_special_tokens_written_in_a_text_are_ordinary_characters(bert):
    tokens = bert.tokenizer.encode("a [SEP] b [MASK]").ids
    assert tokens.count(bert.tokenizer.sep_id) == 1 and bert.tokenizer.mask_id not in tokens
    (guesses,) = bert.fill("a [SEP] b [MASK]", top=1)
    assert len(guesses) == 1


def test_a_vocabulary_that_does_not_match_the_embedding_rows_is_rejected(folder, tmp_path):
    bert = bertsmith.load(folder)
    bert.save(tmp_path)
    write_model(tmp_path, Model(tiny_network()))
    with pytest.raises(
        UserError, match=r"the tokenizer has \d+ entries, but the model has 99 embedding rows"
    ):
        bertsmith.load(tmp_path)


def test_rows_beyond_the_vocabulary_are_never_guessed(bert, tmp_path):
    bert.save(tmp_path)
    config = tiny_encoder_config(vocabulary=bert.tokenizer.vocabulary_size + 40)
    network = new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.heads["mlm"].bias[-40:] = 100.0
    write_model(tmp_path, Model(network))
    guesses = bertsmith.load(tmp_path).fill("a [MASK]", top=5)[0]
    assert 0 < guesses[0].probability < 0.5


def test_a_vocabulary_far_smaller_than_the_embedding_is_noted(bert, tmp_path, caplog):
    bert.save(tmp_path)
    config = tiny_encoder_config(vocabulary=bert.tokenizer.vocabulary_size + 500)
    write_model(tmp_path, Model(new_network(config, {}, torch.Generator().manual_seed(0))))
    bertsmith.load(tmp_path)
    assert "500 of the model's" in caplog.text


def test_more_segments_than_the_model_has_are_rejected(bert, tmp_path):
    bert.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"type_id": 1', '"type_id": 7'))
    with pytest.raises(UserError, match="numbers 8 segments but the model has 2"):
        bertsmith.load(tmp_path)


def test_an_untrained_pooler_answers_no_question(bert, tmp_path):
    bert.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    again = bertsmith.load(tmp_path)
    assert "pooler" not in again.heads
    with pytest.raises(UserError, match="lacks the pooler head, .* to judge whether one sentence follows"):
        again.next_sentence("a", "b")


def test_a_member_without_next_sentence_says_so(bert, tmp_path):
    bert.save(tmp_path)
    config = tiny_encoder_config("distilbert", vocabulary=bert.tokenizer.vocabulary_size)
    write_model(tmp_path, Model(new_network(config, {"mlm": 0}, torch.Generator().manual_seed(0))))
    with pytest.raises(UserError, match="distilbert models lack a nsp head"):
        bertsmith.load(tmp_path).next_sentence("a", "b")


@pytest.mark.parametrize("device", ["tpu", "", 3.5, "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_rejected(folder, device):
    with pytest.raises(UserError, match="device"):
        bertsmith.load(folder, device=device)


def test_what_is_no_folder_is_rejected_with_what_to_give(folder):
    with pytest.raises(
        UserError, match=r"bert-base-uncased: this folder does not exist; .*downloads nothing"
    ):
        bertsmith.load("bert-base-uncased")
    with pytest.raises(UserError, match="is a file, not a model folder; give its folder"):
        bertsmith.load(folder / "config.json")


def test_a_path_may_begin_with_the_home_folder(bert, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    bert.save("~/model")
    assert (tmp_path / "model" / "config.json").exists()
    assert bertsmith.load("~/model").heads == bert.heads


def test_a_model_saved_over_another_is_the_one_that_is_read_and_no_file_of_others_is_gone(bert, tmp_path):
    byte_bpe(tmp_path)
    theirs = saved_oracle(tmp_path, "roberta", "ForMaskedLM")
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "added_tokens.json").write_text('{"<e>": 500}')
    others = {file.name: file.read_bytes() for file in tmp_path.iterdir() if "model.saf" not in file.name}
    others.pop("config.json")
    bert.save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    again = bertsmith.load(tmp_path)
    assert again.tokenizer.mask_token == "[MASK]"
    assert again.fill("a [MASK]") == bert.fill("a [MASK]")
    text = "my dog [MASK] <mask> <e>"
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert bert.tokenizer.encode(text, allow_special=("[MASK]",)).ids == expected


def test_added_tokens_live_through_load_and_save(bert, folder, tmp_path):
    for file in ("config.json", "vocab.txt", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    size = bert.tokenizer.vocabulary_size
    words = bert.model.network.encoder.embeddings.words.weight
    change_config(tmp_path, vocab_size=size + 2)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name, tensor in tensors.items() if len(tensor) == len(words)]:
        tensors[name] = torch.cat([tensors[name], tensors[name][:2]])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "added_tokens.json").write_text(f'{{"covid19": {size}, "[E1]": {size + 1}}}')
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["[E1]"]}')
    text = "my dog covid19 [E1] is cute"
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert {size, size + 1} < set(expected)
    for _ in range(2):  # the second time from the files that the first one wrote
        loaded = bertsmith.load(tmp_path)
        assert loaded.tokenizer.encode(text, allow_special=("[E1]",)).ids == expected
        loaded.save(tmp_path)
        assert (tmp_path / "added_tokens.json").is_file() and (tmp_path / "special_tokens_map.json").is_file()
        assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == expected


def test_a_text_is_cut_where_tokenizer_config_ends_it_as_in_transformers(bert, tmp_path):
    bert.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"model_max_length": 32}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs("snow " * 50, truncation=True)["input_ids"]) == 32
    loaded = bertsmith.load(tmp_path)
    assert loaded.hidden_states(["snow " * 50], truncate=True)[0].shape[1] == 32
    with pytest.raises(UserError, match="has 52 tokens, but the model takes 32"):
        loaded.embed(["snow " * 50])


def test_an_unknown_precision_is_rejected(folder):
    with pytest.raises(UserError, match="unknown precision 'fp8'; choose one of auto, fp32, bf16, int8"):
        bertsmith.load(folder, precision="fp8")


def test_what_the_folder_lacks_is_logged(folder, tmp_path, caplog):
    bert = bertsmith.load(folder)
    bert.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"odd.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    bertsmith.load(tmp_path)
    assert "odd.weight" in caplog.text


FAIRSEQ = ["<unk>", "<s>", "</s>"]
FOREIGN = [
    ("deberta-v2", "spm.model", ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]),
    ("xlm-roberta", "sentencepiece.bpe.model", FAIRSEQ),
    ("camembert", "sentencepiece.bpe.model", FAIRSEQ),
]


@pytest.mark.parametrize(("model_type", "file", "first"), FOREIGN, ids=[each[0] for each in FOREIGN])
def test_a_folder_with_a_sentencepiece_model_opens_predicts_and_is_saved(model_type, file, first, tmp_path):
    saved_oracle(tmp_path / "source", model_type, "ForMaskedLM")
    learned = ["\N{LOWER ONE EIGHTH BLOCK}", *"abcdefghijklmnopqrstuvwxyz", "\N{LOWER ONE EIGHTH BLOCK}the"]
    pieces = [(text, 0.0, UNKNOWN if "unk" in text.lower() else CONTROL) for text in first]
    pieces += [(text, -1.0 - number / 8, NORMAL) for number, text in enumerate(learned)]
    unknown = next(number for number, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    write_sentencepiece(tmp_path / "source" / file, pieces, unknown_id=unknown)
    bert = bertsmith.load(tmp_path / "source")
    bert.save(tmp_path / "copy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "copy").eval()
    text = f"the cat {bert.tokenizer.mask_token} the dog"
    inputs = tokenizer(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    (mask,) = (inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()
    with torch.no_grad():
        scores = theirs(**inputs).logits[0, mask[0]]
    expected = scores[: bert.tokenizer.vocabulary_size].softmax(-1).topk(3)
    (found,) = bertsmith.load(tmp_path / "copy").fill(text, top=3)
    assert [each.token for each in found] == [
        tokenizer.convert_ids_to_tokens(int(each)) for each in expected.indices
    ]
    assert [each.probability for each in found] == pytest.approx(expected.values.tolist(), rel=1e-4)
    assert bert.embed(["the cat", "a dog"]).shape == (2, 32)

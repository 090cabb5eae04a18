"""What every request passes: ids, the key, origins, limits, time, the log, the drain."""

import asyncio
import json
import logging
import shutil

import httpx
import pytest

from bertsmith.core.errors import UserError
from bertsmith.inference.outputs import ABILITIES
from bertsmith.serve.api_errors import INTERNAL_ERROR
from bertsmith.serve.monitoring import JsonLines
from bertsmith.serve.playground import playground_routes
from bertsmith.serve.server_config import Limits, ServerConfig, allowed_hosts
from tests.toy_folder import write_toy_folder
from tests.unit.serve.serving import Slowly, application_of, error_of, get, post, talk, until

TEXT = {"texts": ["a very secret cat"]}


def mood_of(folders, **more):
    return application_of({"mood": folders["mood"]}, **more)


# ---- ids, kinds of failures


def test_a_harmless_request_id_comes_back_and_any_other_is_replaced(application):
    assert (
        get(application, "/health", headers={"x-request-id": "Abc-1.2_3"}).headers["x-request-id"]
        == "Abc-1.2_3"
    )
    for odd in ("a b", "x" * 65, "<script>", "\u00e9", ""):
        given = get(application, "/health", headers={"x-request-id": odd.encode()}).headers["x-request-id"]
        assert len(given) == 32 and given != odd


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/fill", {"text": "no mask"}, 422, "text: lacks a [MASK]"),
        ("/fill", {"text": "[MASK]", "top": "5"}, 422, "top: expected a whole number from 1 to 100, got "),
        ("/fill", {"text": "[MASK]", "top": 0}, 422, "top: expected a whole number from 1 to 100"),
        ("/fill", {"text": "[MASK]", "tpo": 5}, 422, "tpo: unknown field; the fields are model, text"),
        ("/fill", {}, 422, "text: is missing; expected a string"),
        ("/fill", [], 422, "the body: expected a JSON object with text, got an empty list"),
        ("/fill", {"text": "[MASK]", "model": "mood"}, 422, "the model mood cannot predict words; it can "),
        ("/fill", {"text": "[MASK]", "model": "x\ny"}, 404, "this server does not have a model 'x\\ny'"),
        ("/fill", {"text": "[MASK]", "model": "x" * 5000}, 404, "x'; GET /models lists its models"),
        ("/classify", {"texts": []}, 422, "texts: expected a list of strings or lists of 2"),
        ("/classify", {"texts": ["cat", " \t"]}, 422, "texts[1]: is empty"),
        ("/classify", {"texts": ["\u200b\u0007"]}, 422, "texts[0]: does not have a token"),
        ("/classify", {"texts": ["cat " * 100]}, 422, "has 102 tokens, but the model mood takes 64"),
        ("/classify", {"texts": ["cat"], "model": "alike"}, 422, "the model alike supports only pairs"),
        ("/classify", {"texts": ["a \ud800"]}, 422, "texts[0]: contains half a character"),
        ("/fill", {"text": "[MASK] \udfff"}, 422, "text: contains half a character"),
        ("/fill", {"text": "[MASK]", "\ud800": 1}, 422, "?: unknown field"),
        ("/compare", {"texts": ["cat"]}, 422, "texts: expected a list of 2 or more strings, got a list of 1"),
        ("/classify", {"texts": ["cat"] * 300}, 413, "300 texts in one request; this server accepts 256"),
        ("/tag", {"texts": ["x" * 60_000]}, 413, "texts[0]: has 60000 characters; this server accepts 50000"),
        ("/nowhere", {}, 404, "this path does not exist; the paths are POST /fill, /next, "),
        ("/health", {}, 405, "this path supports GET"),
    ],
)  # fmt: skip
def test_every_mistake_is_reported_in_one_line(path, body, status, message, application):
    reply = post(application, path, body)
    assert reply.status_code == status
    assert message in error_of(reply)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/fill", {"text": " "}, "text"),
        ("/next", {"first": "", "second": "a"}, "first"),
        ("/next", {"first": "a", "second": " "}, "second"),
        ("/answer", {"question": "", "passage": "a"}, "question"),
        ("/answer", {"question": "a", "passage": ""}, "passage"),
        ("/choose", {"context": " ", "options": ["a", "b"]}, "context"),
        ("/choose", {"context": "a", "options": ["a", ""]}, "options[1]"),
        ("/classify", {"texts": [["a", "b"], ["a", ""]]}, "texts[1][1]"),
        ("/look/tokens", {"first": "a", "second": ""}, "second"),
        ("/look/attention", {"first": ""}, "first"),
        ("/look/senses", {"word": "a", "sentences": ["a", ""]}, "sentences[1]"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
        ("/embed", {"inputs": ""}, "inputs"),
        ("/predict", {"inputs": ["a", ""]}, "inputs[1]"),
        ("/predict", {"inputs": [["a"], [""]]}, "inputs[1]"),
        ("/rerank", {"query": "", "texts": ["a"]}, "query"),
        ("/rerank", {"query": "a", "texts": ["a", ""]}, "texts[1]"),
        ("/rerank", {"query": "", "texts": ["a"], "model": "toy"}, "query"),
        ("/rerank", {"query": "a", "texts": ["a", ""], "model": "toy"}, "texts[1]"),
    ],
)
def test_an_empty_text_is_called_by_its_field(path, body, field, application):
    assert error_of(post(application, path, body)) == f"{field}: is empty; write some words"


def test_what_a_model_complains_of_is_called_by_its_field(application):
    told = error_of(post(application, "/next", {"first": "a", "second": "\u200b"}))
    assert told.startswith("first with second: does not have a token")
    told = error_of(post(application, "/look/senses", {"word": "a", "sentences": ["a", "\u200b"]}))
    assert told.startswith("sentences[1]: does not have a token")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", {"texts": ["a"]}),
        ("/predict", {"inputs": "a"}),
        ("/predict", {"inputs": [["a", "b"], ["a"]]}),
    ],
)
def test_what_the_model_takes_instead_is_reported_in_words_of_the_request(path, body, application):
    told = error_of(post(application, path, {**body, "model": "alike"}))
    assert told.endswith(": the model alike supports only pairs; send [first, second]")


def test_a_path_that_takes_another_method_names_it(application):
    reply = get(application, "/fill")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert error_of(reply) == "this path supports POST only"


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/models", "/page/app.js"])
def test_head_is_answered_where_get_is_without_a_body(path, address):
    with httpx.Client(base_url=address) as client:
        told, got = client.head(path), client.get(path)  # on one line: a body would spoil the second
    assert (told.status_code, told.content) == (200, b"")
    assert told.headers["content-length"] == got.headers["content-length"]


def test_a_path_that_takes_get_names_head_too(application):
    assert post(application, "/health", {}).headers["allow"] == "GET, HEAD"


def test_what_there_is_instead_of_a_path_that_is_not_is_said_whole(application):
    told = error_of(get(application, "/nowhere"))
    paths = get(application, "/openapi.json").json()["paths"]
    assert set(paths) < set(told.replace(",", " ").replace(";", " ").split())


def test_what_no_model_can_do_is_reported(folders):
    reply = post(mood_of(folders), "/answer", {"question": "who?", "passage": "me"})
    assert reply.status_code == 422
    assert "no model of this server can answer questions; " in error_of(reply)


def test_what_a_model_can_do_instead_is_reported_in_words(folders):
    body = {"question": "who?", "passage": "me", "model": "toy"}
    told = error_of(post(application_of({"toy": folders["toy"]}), "/answer", body))
    assert told == (
        "the model toy cannot answer questions; it can predict words, judge whether one sentence follows "
        "another, embed texts, show its inside"
    )


def test_every_ability_has_its_words(folders):
    can = {ability for model in application_of(folders).models for ability in model.info.abilities}
    assert can <= set(ABILITIES)


def test_a_fault_of_ours_is_reported_without_its_inside(folders, caplog):
    application = mood_of(folders)
    application.models["mood"].queue._predict = lambda kind, inputs: 1 / 0
    with caplog.at_level(logging.INFO, "bertsmith.serve"):
        reply = post(application, "/classify", TEXT)
    assert reply.status_code == 500
    assert error_of(reply) == "the server failed; its log has the details under this request id"
    failure, request = caplog.records
    assert failure.fields["failure"] == "ZeroDivisionError"
    assert failure.fields["request_id"] == request.fields["request_id"] == reply.headers["x-request-id"]


# ---- key and origins


def test_a_key_opens_what_is_not_open_to_all(folders):
    application = mood_of(folders, api_key="se-cret")
    for path in ("/models", "/metrics", "/openapi.json", "/v1/models"):
        assert get(application, path).status_code == 401
        assert get(application, path, headers={"authorization": "Bearer se-cret"}).status_code == 200
    for path in ("/health", "/ready", "/"):
        assert get(application, path).status_code == 200
    wrong = post(application, "/classify", TEXT, headers={"authorization": "Bearer \u00fc".encode()})
    assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, "Bearer")
    assert error_of(wrong) == "the API key is wrong; send it as Authorization: Bearer KEY"
    missing = error_of(post(application, "/classify", TEXT))
    assert missing == "this server asks for an API key; send it as Authorization: Bearer KEY"
    right = post(application, "/classify", TEXT, headers={"authorization": "Bearer se-cret"})
    assert right.status_code == 200


@pytest.mark.parametrize("sent", ["Bearer schl\u00fcssel", "bearer schl\u00fcssel", "BEARER  schl\u00fcssel"])
def test_a_key_is_utf_8_behind_bearer_in_any_case(sent, folders):
    application = mood_of(folders, api_key="schl\u00fcssel")
    assert get(application, "/models", headers={"authorization": sent.encode()}).status_code == 200
    wrong = {"authorization": sent.encode("latin-1").replace(b" ", b" x")}
    assert get(application, "/models", headers=wrong).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("localhost.:8000", 200),
        ("bert.example.org:443", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("0x7f.1", 421),
        ("[::1].evil.example", 400),
        ("::1", 400),
        ("user@localhost", 400),
        ("localhost, evil.example", 400),
        ("localhost:port", 400),
        ("\u00e9", 400),
        (":8000", 400),
        ("", 400),
    ],
)
def test_a_request_for_another_host_is_rejected(host, status, folders):
    application = mood_of(folders, allow_hosts=allowed_hosts("127.0.0.1", ["bert.example.org"]))
    reply = get(application, "/models", headers={"host": host.encode()})
    assert reply.status_code == status
    messages = {400: "the Host header is invalid", 421: "--allow-host NAME adds a name"}
    assert status == 200 or messages[status] in error_of(reply)


def test_any_host_is_taken_where_the_operator_says_so(folders):
    application = mood_of(folders, allow_hosts=allowed_hosts("127.0.0.1", ["*"]))
    assert get(application, "/models", headers={"host": "evil.example"}).status_code == 200


def test_no_reply_sends_anybody_to_the_host_that_the_request_named(folders):
    reply = get(mood_of(folders), "/models/", headers={"host": "evil.example"})
    assert (reply.status_code, "location" in reply.headers) == (404, False)


def test_a_preflight_is_answered_with_a_request_id(folders):
    application = mood_of(folders, allow_origins=("https://friend.example",))
    asked = {"origin": "https://friend.example", "access-control-request-method": "POST", "x-request-id": "a"}
    reply = talk(application, lambda client: client.options("/classify", headers=asked))
    assert (reply.status_code, reply.headers["x-request-id"]) == (200, "a")


def test_a_fault_outside_of_the_routes_is_answered_with_a_request_id_too(folders, monkeypatch, caplog):
    application = mood_of(folders)
    monkeypatch.setattr(application.body_limit, "_read", lambda *_: 1 / 0)
    reply = post(application, "/classify", TEXT)
    assert (reply.status_code, error_of(reply)) == (500, INTERNAL_ERROR)


def test_no_other_site_may_ask_unless_it_is_named(folders):
    origin = {"origin": "https://friend.example"}
    asked = {**origin, "access-control-request-method": "POST"}
    preflight = talk(mood_of(folders), lambda client: client.options("/classify", headers=asked))
    assert preflight.status_code == 405
    assert (
        "access-control-allow-origin" not in post(mood_of(folders), "/classify", TEXT, headers=origin).headers
    )
    application = mood_of(folders, allow_origins=("https://friend.example",), api_key="k")
    preflight = talk(application, lambda client: client.options("/classify", headers=asked))
    assert preflight.headers["access-control-allow-origin"] == "https://friend.example"
    refused = post(application, "/classify", TEXT, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
        401,
        "https://friend.example",
    )
    other = post(application, "/classify", TEXT, headers={"origin": "https://foe.example"})
    assert "access-control-allow-origin" not in other.headers


def test_all_sites_without_a_key_are_rejected_at_the_start(folders):
    with pytest.raises(UserError, match="every web site could use"):
        ServerConfig(models=folders, allow_origins=("*",))
    assert ServerConfig(models=folders, allow_origins=("*",), api_key="k")
    assert "'k'" not in repr(ServerConfig(models=folders, api_key="k"))


# ---- bodies and time


@pytest.mark.parametrize("size", [1001, 5_000_000])
def test_a_body_that_is_too_large_is_rejected_whether_it_says_so_or_not(size, folders):
    application = mood_of(folders, limits=Limits(body_bytes=1000))

    async def parts():
        for _ in range(100):
            yield b"x" * (size // 100 + 1)

    for content in (b"x" * size, parts()):
        reply = talk(application, lambda client, content=content: client.post("/classify", content=content))
        assert (reply.status_code, reply.headers["connection"]) == (413, "close")
        assert "this server accepts 1000 bytes" in error_of(reply)


def test_a_body_that_comes_too_slowly_is_rejected(folders):
    application = mood_of(folders, limits=Limits(body_seconds=0.1))

    async def parts():
        yield b"{"
        await asyncio.sleep(2)
        yield b"}"

    reply = talk(application, lambda client: client.post("/classify", content=parts()))
    assert (reply.status_code, reply.headers["connection"]) == (408, "close")


def test_a_request_that_takes_too_long_ends_and_its_work_is_dropped(folders):
    application = mood_of(folders, limits=Limits(request_seconds=1))
    slow = Slowly(application, "mood")

    async def say(client):
        first = asyncio.create_task(client.post("/classify", json=TEXT))
        await until(lambda: slow.batches == [1])
        late = await asyncio.gather(first, client.post("/classify", json=TEXT))
        assert application.models["mood"].queue.requests == 0
        slow.may_go.set()
        return [*late, await client.post("/classify", json=TEXT)]

    replies = talk(application, say)
    assert [reply.status_code for reply in replies] == [504, 504, 200]
    assert "no answer within 1 s" in error_of(replies[0])
    assert slow.batches == [1, 1]  # what had not begun was never asked


# ---- draining


def test_while_draining_the_accepted_finish_and_the_new_are_sent_away(folders):
    application = mood_of(folders)
    slow = Slowly(application, "mood")

    async def say(client):
        accepted = asyncio.create_task(client.post("/classify", json=TEXT))
        await until(lambda: slow.batches == [1])
        application.status.is_draining = True
        late, ready, health = [
            await client.post("/classify", json=TEXT),
            await client.get("/ready"),
            await client.get("/health"),
        ]
        slow.may_go.set()
        return late, ready, health, await accepted

    late, ready, health, accepted = talk(application, say)
    assert (late.status_code, late.headers["connection"]) == (503, "close")
    assert "shutting down" in error_of(late)
    assert (ready.status_code, health.status_code, accepted.status_code) == (503, 200, 200)


# ---- models


def test_weights_come_with_the_first_use(folders):
    application = application_of({"toy": folders["toy"], "mood": folders["mood"]})

    def loaded():
        return [model["loaded"] for model in get(application, "/models").json()["models"]]

    assert loaded() == [True, False]

    async def say(client):
        return await asyncio.gather(*(client.post("/classify", json=TEXT) for _ in range(5)))

    assert {reply.status_code for reply in talk(application, say)} == {200}
    assert loaded() == [True, True]


def test_a_folder_that_goes_missing_is_reported_and_may_come_back(folders, tmp_path):
    shutil.copytree(folders["mood"], tmp_path / "mood")
    application = application_of({"toy": folders["toy"], "mood": tmp_path / "mood"})
    (tmp_path / "mood").rename(tmp_path / "away")
    reply = post(application, "/classify", TEXT)
    assert reply.status_code == 503
    assert str(tmp_path) not in error_of(reply)
    (tmp_path / "away").rename(tmp_path / "mood")
    assert post(application, "/classify", TEXT).status_code == 200


def test_a_wrong_folder_is_reported_at_the_start(folders, tmp_path):
    with pytest.raises(UserError, match="this folder does not exist"):
        application_of({"toy": tmp_path / "nothing"})
    with pytest.raises(UserError, match="there are no models to serve"):
        ServerConfig(models={})


def test_the_first_model_that_can_do_it_answers(folders, tmp_path):
    write_toy_folder(tmp_path / "other")
    application = application_of(
        {"names": folders["names"], "one": folders["toy"], "two": tmp_path / "other"}
    )
    assert post(application, "/fill", {"text": "a [MASK]"}).json()["model"] == "one"
    assert post(application, "/fill", {"text": "a [MASK]", "model": "two"}).json()["model"] == "two"


# ---- log and counts


def test_the_log_tells_of_requests_and_never_of_texts(folders, caplog):
    application = mood_of(folders)
    with caplog.at_level(logging.DEBUG):
        reply = post(application, "/classify", TEXT)
        post(application, "/classify", {"texts": ["secret"], "secret": 1})
        get(application, "/secret/path?secret=1")
    lines = [
        json.loads(JsonLines().format(record))
        for record in caplog.records
        if record.name == "bertsmith.serve"
    ]
    first, second, third = lines
    assert first["request_id"] == reply.headers["x-request-id"]
    assert (first["route"], first["status"], first["model"], first["texts"]) == ("/classify", 200, "mood", 1)
    assert first["tokens"] > 3 and first["seconds"] > 0
    assert (second["status"], third["route"], third["status"]) == (422, "elsewhere", 404)
    ours = [
        JsonLines().format(record)
        for record in caplog.records
        if record.name.startswith(("bertsmith", "uvicorn"))
    ]
    assert "secret" not in "".join(ours)


def test_the_log_names_a_fault_but_not_its_message():
    try:
        raise ValueError("a very secret cat")
    except ValueError as error:
        record = logging.LogRecord(
            "uvicorn.error", 40, "", 0, "broken", (), (ValueError, error, error.__traceback__)
        )
    line = json.loads(JsonLines().format(record))
    assert line["failure"] == "ValueError" and "test_the_log_names" in line["places"][-1]
    assert "secret" not in json.dumps(line)


def test_prometheus_is_reported_of_requests_and_batches(folders):
    application = mood_of(folders)
    post(application, "/classify", TEXT)
    get(application, "/any/thing")
    reply = get(application, "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert 'bertsmith_requests_total{route="/classify",status="200"} 1.0' in reply.text
    assert 'bertsmith_requests_total{route="elsewhere",status="404"} 1.0' in reply.text
    assert 'bertsmith_batch_requests_count{model="mood",question="classify"} 1.0' in reply.text
    assert 'bertsmith_waiting_tokens{model="mood"} 0.0' in reply.text
    assert 'bertsmith_model_loaded{model="mood"} 1.0' in reply.text
    assert "bertsmith_open_requests 1.0" in reply.text


# ---- the page and the document


def test_the_page_is_served_with_a_strict_policy_and_no_surprise_from_a_cache(application):
    page = get(application, "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    assert page.headers["cache-control"] == "no-cache"
    again = get(application, "/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e%2fapp.py", "/page/__init__.py"):
        assert get(application, path).status_code == 404


def test_an_installation_without_its_page_does_not_start(tmp_path):
    with pytest.raises(AssertionError, match="lacks page.html: the installation is incomplete"):
        playground_routes(tmp_path)


def test_answers_are_not_kept_by_caches(application):
    assert get(application, "/models").headers["cache-control"] == "no-store"


def test_the_document_names_every_failure_and_loads_nothing_from_elsewhere(application):
    document = get(application, "/openapi.json").json()
    assert {"200", "401", "413", "415", "422", "429", "503", "504"} <= set(
        document["paths"]["/fill"]["post"]["responses"]
    )
    assert get(application, "/docs").status_code == get(application, "/redoc").status_code == 404

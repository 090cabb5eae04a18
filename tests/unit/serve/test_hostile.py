"""Nothing that can be sent makes a fault of ours, tells of our inside, or leaves something behind."""

import resource

import httpx
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from bertsmith.serve.server_config import Limits
from tests.unit.serve.hostile import hostile_requests
from tests.unit.serve.serving import application_of, live

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_hostile_requests_are_rejected_and_no_more(folders, full):
    count = 2400 if full else 240
    application = application_of(folders, limits=Limits(request_seconds=20, body_seconds=5))
    seen = {}
    with live(application) as address, httpx.Client(base_url=address, timeout=60) as client:
        before = 0.0
        for number, request in enumerate(hostile_requests(count, seed=1)):
            if number == count // 4:
                before = peak_megabytes()
            reply = client.request(
                request.method, request.path, content=request.body, headers=request.headers
            )
            seen[reply.status_code] = seen.get(reply.status_code, 0) + 1
            assert reply.status_code < 500, (request.path, request.body[:300], reply.text[:300])
            assert "Traceback" not in reply.text
            assert reply.headers["x-request-id"]
            if reply.status_code >= 400 and request.method != "HEAD":
                assert set(reply.json()) == {"error"}
        grown = peak_megabytes() - before
        assert client.post("/classify", json={"texts": ["cat"]}).status_code == 200
    assert {200, 404, 405, 413, 422} <= set(seen)
    assert grown < 150
    assert application.status.open_requests == 0
    assert all(model.queue.tokens == 0 for model in application.models)


@pytest.fixture(scope="module")
def document(address):
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


def test_every_operation_keeps_to_the_document(document, full):
    from hypothesis import HealthCheck, Phase, given, settings

    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) >= 18
    for operation in operations:
        modes = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
        for mode in modes:
            if mode is schemathesis.GenerationMode.NEGATIVE and operation.method.upper() == "GET":
                continue

            @settings(
                max_examples=150 if full else 4,
                deadline=None,
                derandomize=not full,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def sent(case):
                case.call_and_validate(checks=list(CHECKS))

            sent()

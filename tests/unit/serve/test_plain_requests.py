"""What is taken for one plain request is one for h11 too, with the same words in it: or lines fall apart."""

import h11
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from bertsmith.serve.plain import Plain, plain_request

NAMES = [b"Accept", b"User-Agent", b"X-Request-Id", b"Authorization", b"x-odd_name"]
VALUES = [b"*/*", b"a b\tc", b"", b"Bearer k", b"caf\xc3\xa9", b"a,b;q=1"]
HARM = [b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"\x0b", b"\xff", b"0", b"Content-Length: 3\r\n"]
HARM += [
    b"Transfer-Encoding: chunked\r\n",
    b"Host: other\r\n",
    b"Expect: 100-continue\r\n",
    b"POST / HTTP/1.1\r\n",
]
HARM += [b"Upgrade: websocket\r\n", b"Connection: close\r\n", b"Connection: upgrade\r\n"]

fields = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=3, unique_by=lambda f: f[0]
)


@st.composite
def requests(draw) -> bytes:
    """A whole plain request."""
    body = draw(st.binary(max_size=30))
    path = draw(st.sampled_from([b"/fill", b"/", b"/v1/embeddings?a=b&c", b"/x.y~z"]))
    length = draw(st.sampled_from([b"Content-Length", b"content-length"]))
    own = [(b"Host", b"here"), (length, b"%d" % len(body)), *draw(fields)]
    lines = [b"POST %b HTTP/1.1" % path, *(b"%b: %b" % each for each in draw(st.permutations(own)))]
    return b"\r\n".join([*lines, b"", b""]) + body


@st.composite
def harmed(draw) -> bytes:
    """Such a request with something put in, left out or said twice somewhere."""
    data = draw(requests())
    for _ in range(draw(st.integers(1, 2))):
        place, size = draw(st.integers(0, len(data))), draw(st.integers(0, 3))
        line_ends = [end + 2 for end in range(len(data)) if data[end : end + 2] == b"\r\n"]
        place = draw(st.sampled_from([place, *line_ends]))
        data = data[:place] + draw(st.sampled_from([b"", *HARM])) + data[place + size :]
    return data


def read_by_h11(data: bytes) -> tuple[h11.Request, bytes] | None:
    """The one request in these bytes and its body; nothing where they are not just that."""
    line = h11.Connection(h11.SERVER)
    line.receive_data(data)
    try:
        request, body = line.next_event(), b""
        if not isinstance(request, h11.Request):
            return None
        while isinstance(piece := line.next_event(), h11.Data):
            body += bytes(piece.data)
    except h11.RemoteProtocolError:
        return None
    whole = isinstance(piece, h11.EndOfMessage) and not line.trailing_data[0]
    return (request, body) if whole else None


def says_the_same(plain: Plain, read: tuple[h11.Request, bytes]) -> bool:
    request, body = read
    target = plain.raw_path + (b"?" + plain.query if plain.query else b"")
    asked = (request.method, request.target.rstrip(b"?"), sorted(request.headers), body)
    return asked == (b"POST", target, sorted(plain.headers.items()), plain.body)


@given(data=requests())
def test_an_ordinary_request_is_taken_and_read_as_h11_reads_it(data):
    plain, read = plain_request(data), read_by_h11(data)
    assert plain is not None and read is not None
    assert says_the_same(plain, read)


@given(data=harmed())
def test_whatever_is_done_to_a_request_it_is_taken_only_where_h11_reads_the_same(data):
    plain = plain_request(data)
    event("taken" if plain else "left to h11")
    if plain is not None:
        read = read_by_h11(data)
        assert read is not None and says_the_same(plain, read)


@pytest.mark.parametrize(
    "field",
    [
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Upgrade: websocket",
        b"Origin: https://a.example",
    ]
    + [b"Connection: close", b"Content-Length: 4", b"Host: again", b"X-A: b\r\nx-a: c"],
)
def test_what_changes_the_meaning_of_a_request_goes_the_long_way(field):
    plain = b"POST /fill HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\nabcd"
    assert plain_request(plain) is not None
    assert plain_request(plain.replace(b"\r\n\r\n", b"\r\n" + field + b"\r\n\r\n")) is None
    assert plain_request(plain.replace(b"Host: here\r\n", b"")) is None
    assert plain_request(plain + b"POST / HTTP/1.1\r\n\r\n") is None

"""One set of tiny models, and one server over all of them, for all tests of the server."""

import pytest

from tests.unit.serve.serving import application_of, live, write_folders


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def application(folders):
    return application_of(folders)


@pytest.fixture(scope="session")
def address(folders):
    with live(application_of(folders)) as address:
        yield address

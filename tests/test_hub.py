"""Downloads from a hub: found, resumed, checked, and every way to fail."""

from __future__ import annotations

import collections.abc as abc
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from edgespec import hub, hub_access
from edgespec.errors import DownloadError, EdgespecError, FileAccessError, MissingDependencyError
from tests.hub_stub import COMMIT, HubStub, environment, in_use

DATA = bytes(range(256)) * 1200
REPOSITORY = "owner/model-GGUF"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> abc.Iterator[HubStub]:
    """A hub with one model."""
    with in_use(monkeypatch, tmp_path / "home") as server:
        server.add(REPOSITORY, {"model.gguf": DATA})
        yield server


def the_file(pattern: str = "*.gguf") -> hub.HubFile:
    (file,) = hub.find(REPOSITORY, pattern)
    return file


def refused(error: type[EdgespecError], call: abc.Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(error) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# What there is


def test_a_file_is_found_with_what_the_hub_declares(stub: HubStub) -> None:
    file = the_file("mod*.gguf")
    assert (file.repository, file.commit, file.path, file.size_bytes) == (REPOSITORY, COMMIT, "model.gguf", len(DATA))
    assert len(bytes.fromhex(file.sha256)) == 32


def test_a_split_model_is_found_whole_and_in_order(stub: HubStub) -> None:
    files = stub.repositories[REPOSITORY].files
    files.clear()
    files |= {f"q4/m-0000{i}-of-00003.gguf": b"%d" % i for i in (2, 3, 1)} | {"m-q8.gguf": b"8", "README.md": b""}
    assert [file.name for file in hub.find(REPOSITORY, "q4/*")] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    message = refused(DownloadError, hub.find, REPOSITORY, "*.gguf")
    assert "matches 2 models" in message
    del files["q4/m-00002-of-00003.gguf"]
    assert "m-00002-of-00003" in refused(DownloadError, hub.find, REPOSITORY, "q4/*")


def test_a_pattern_that_matches_nothing_lists_what_is_there(stub: HubStub) -> None:
    files = stub.repositories[REPOSITORY].files
    assert "it has: model.gguf" in refused(DownloadError, hub.find, REPOSITORY, "*.bin")
    assert "it has: model.gguf" in refused(DownloadError, hub.find, REPOSITORY, "MODEL.gguf")
    files |= {f"other-{i:02}.gguf": b"1" for i in range(20)}
    assert "and 9 more" in refused(DownloadError, hub.find, REPOSITORY, "none*")
    files.clear()
    assert "it has: none" in refused(DownloadError, hub.find, REPOSITORY, "*")


@pytest.mark.parametrize("name", ["a/..gguf", "a\\b.gguf", ".hidden.gguf", "C:x.gguf", "nul\x00.gguf"])
def test_a_file_with_an_odd_name_is_not_stored(stub: HubStub, name: str) -> None:
    stub.add(REPOSITORY, {name: b"1"})
    assert "not stored" in refused(DownloadError, hub.find, REPOSITORY, "*")


def test_a_file_without_a_size_is_not_stored(stub: HubStub) -> None:
    stub.add(REPOSITORY, {"empty.gguf": b""})
    assert "of 0 bytes" in refused(DownloadError, hub.find, REPOSITORY, "*")


def test_a_file_is_stored_under_its_last_name_only(stub: HubStub, tmp_path: Path) -> None:
    stub.add(REPOSITORY, {"../../evil.gguf": b"1"})
    assert the_file().name == "evil.gguf"


@pytest.mark.parametrize("text", ["<html>Please log in to the hotel's network</html>", "[]", "{}", '{"id": 3}'])
def test_what_is_no_hub_is_named(stub: HubStub, text: str) -> None:
    stub.listing_text = text
    assert stub.address in refused(DownloadError, hub.find, REPOSITORY, "*")


def test_what_cannot_be_found_is_named(stub: HubStub) -> None:
    assert "owner/none" in refused(DownloadError, hub.find, "owner/none", "*")
    assert "no revision 'v2'" in refused(DownloadError, hub.find, REPOSITORY, "*", "v2")
    file = the_file()
    del stub.repositories[REPOSITORY].files["model.gguf"]
    assert "no such file" in refused(DownloadError, hub.check_access, file)


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_how_to_get_in(stub: HubStub, status: int, tmp_path: Path) -> None:
    stub.repositories[REPOSITORY].gated = status
    file = the_file()
    for call in (lambda: hub.check_access(file), lambda: hub.download(file, tmp_path)):
        message = refused(DownloadError, call)
        assert f"accept its licence at {stub.address}/{REPOSITORY}" in message
        assert "hf auth login" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "not-an-address", "http://[::1"])
def test_a_hub_that_is_not_there_is_named(stub: HubStub, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert address in refused(DownloadError, hub.find, REPOSITORY, "*")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "socks5://127.0.0.1:9"),  # needs a package that huggingface_hub does not bring
        ("HTTPS_PROXY", "no-proxy://127.0.0.1:9"),
        ("SSL_CERT_FILE", "/nonexistent"),
        ("HF_TOKEN", "hf_\u00e4"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    close_session()
    monkeypatch.setenv(name, value)
    message = refused(DownloadError, hub.find, REPOSITORY, "*")
    assert "check the proxy (HTTPS_PROXY, ALL_PROXY), SSL_CERT_FILE, and what begins with HF_" in message
    assert stub.requests == []


def test_credentials_that_cannot_be_read_are_named(
    stub: HubStub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "file" / "token"))
    assert "what begins with HF_" in refused(DownloadError, hub.find, REPOSITORY, "*")


@pytest.mark.parametrize("commit", ["../../elsewhere", "/elsewhere", "main", "", None])
def test_a_commit_that_would_lead_elsewhere_is_refused(stub: HubStub, commit: Any) -> None:
    stub.commit = commit
    assert "does not answer as the hub does" in refused(DownloadError, hub.find, REPOSITORY, "*")


def test_an_address_that_is_none_is_refused(stub: HubStub) -> None:
    stub.location = "http://[none"
    assert "does not answer as the hub does" in refused(DownloadError, hub.check_access, the_file())


def test_offline_mode_is_respected(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(DownloadError, hub.find, REPOSITORY, "*")
    assert stub.requests == []


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_access.library.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'edgespec[hub]'" in refused(MissingDependencyError, hub.find, REPOSITORY, "*")


# Fetching


def test_a_file_comes_whole(stub: HubStub, tmp_path: Path) -> None:
    told: list[int] = []
    path = hub.download(the_file(), tmp_path / "new" / "folder", told.append)
    assert path.read_bytes() == DATA
    assert names(path.parent) == ["model.gguf"]
    assert (told[0], told[-1]) == (0, len(DATA))
    num_requests = len(stub.requests)
    assert hub.download(the_file(), path.parent) == path
    assert [request.method for request in stub.requests[num_requests:]] == ["GET"]  # the listing only


def test_a_token_goes_to_the_hub_and_no_further(stub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.check_access(the_file())
    hub.download(the_file(), tmp_path)
    tokens = {request.path.startswith("/cdn/"): request.token for request in stub.requests}
    assert tokens == {False: "Bearer hf_secret", True: None}


def test_a_download_goes_on_where_it_broke_off(stub: HubStub, tmp_path: Path) -> None:
    stub.failures = [("break", 100_000), ("break", 50_000)]
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA
    assert stub.ranges() == [None, "bytes=100000-", "bytes=150000-"]


def test_what_came_before_a_failure_is_kept_for_the_next_call(stub: HubStub, tmp_path: Path) -> None:
    stub.failures = [("break", 70_000), *([503] * hub.NUM_TRIES)]
    message = refused(DownloadError, hub.download, the_file(), tmp_path)
    assert "70000 of 307200 bytes (the hub answered 503)" in message
    assert names(tmp_path) == ["model.gguf.partial"]
    assert hub.num_missing(the_file(), tmp_path) == len(DATA) - 70_000
    stub.requests.clear()
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA
    assert stub.ranges() == ["bytes=70000-"]
    assert hub.num_missing(the_file(), tmp_path) == 0


def test_ctrl_c_keeps_what_came(stub: HubStub, tmp_path: Path) -> None:
    def interrupt(num_bytes: int) -> None:
        if num_bytes:
            raise KeyboardInterrupt

    stub.add(REPOSITORY, {"model.gguf": DATA * 10})
    with pytest.raises(KeyboardInterrupt):
        hub.download(the_file(), tmp_path, interrupt)
    assert 0 < (tmp_path / "model.gguf.partial").stat().st_size < len(DATA * 10)
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA * 10


def test_a_server_that_cannot_resume_starts_again(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "model.gguf.partial").write_bytes(b"something else")
    stub.ignores_range = True
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA


def test_leftovers_that_are_too_long_are_thrown_away(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "model.gguf.partial").write_bytes(DATA + b"!")
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA
    assert stub.ranges() == [None]


@pytest.mark.parametrize("sent", [DATA + b"!", DATA[:-1], b""])
def test_another_size_than_declared_is_refused(stub: HubStub, tmp_path: Path, sent: bytes) -> None:
    stub.repositories[REPOSITORY].sent["model.gguf"] = sent
    for call in (lambda: hub.check_access(the_file()), lambda: hub.download(the_file(), tmp_path)):
        assert f"{len(sent)} bytes" in refused(DownloadError, call)
    assert names(tmp_path) == []


def test_what_came_is_not_lost_to_another_answer(stub: HubStub, tmp_path: Path) -> None:
    """From a portal between here and the hub."""
    file = the_file()
    (tmp_path / "model.gguf.partial").write_bytes(DATA[:1000])
    stub.repositories[REPOSITORY].sent["model.gguf"] = b"<html>log in first</html>"
    stub.ignores_range = True
    assert "25 bytes" in refused(DownloadError, hub.download, file, tmp_path)
    assert (tmp_path / "model.gguf.partial").read_bytes() == DATA[:1000]


def test_a_file_that_was_damaged_since_it_came_is_fetched_again(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(DATA[:-1] + b"?")
    assert "SHA-256" in refused(DownloadError, hub.download, the_file(), tmp_path)
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA


def test_another_content_than_declared_is_thrown_away(stub: HubStub, tmp_path: Path) -> None:
    stub.repositories[REPOSITORY].sent["model.gguf"] = DATA[:-1] + b"!"
    assert "SHA-256" in refused(DownloadError, hub.download, the_file(), tmp_path)
    assert names(tmp_path) == []
    stub.repositories[REPOSITORY].sent.clear()
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA


def test_leftovers_of_another_content_are_found_out(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "model.gguf.partial").write_bytes(b"?" * 1000)
    assert "SHA-256" in refused(DownloadError, hub.download, the_file(), tmp_path)
    assert names(tmp_path) == []


def test_a_file_without_a_declared_sha256_is_taken(stub: HubStub, tmp_path: Path) -> None:
    stub.repositories[REPOSITORY].with_sha256 = False
    assert the_file().sha256 == ""
    assert hub.download(the_file(), tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("status", [404, 416, 418])
def test_an_answer_that_will_not_pass_is_not_asked_for_again(stub: HubStub, tmp_path: Path, status: int) -> None:
    stub.failures = [status, 200]
    assert str(status) in refused(DownloadError, hub.download, the_file(), tmp_path)
    assert len(stub.ranges()) == 1


# The disk


def test_a_disk_that_is_too_small_is_named(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    hub.check_space(tmp_path / "not" / "there", 1000)
    assert "EDGESPEC_DATA_DIR" in refused(FileAccessError, hub.check_space, tmp_path / "not" / "there", free * 2)


def test_a_folder_that_cannot_be_written_is_named(stub: HubStub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused(FileAccessError, hub.download, the_file(), tmp_path / "file")
    assert "cannot be written" in message
    assert "EDGESPEC_DATA_DIR" in message


def test_a_full_disk_is_named_and_what_came_is_kept(stub: HubStub, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs a limit on file sizes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = the_file()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        message = refused(FileAccessError, hub.download, file, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "partial cannot be written: File too large" in message
    assert hub.download(file, tmp_path).read_bytes() == DATA
    assert stub.ranges() == [None, "bytes=100000-"]


def test_one_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "new" / "pair.lock"
    with hub.only_one(lock):
        code = f"from edgespec import hub; from pathlib import Path\nwith hub.only_one(Path({str(lock)!r})): pass"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "another process is at it already" in done.stderr
    with hub.only_one(lock):
        pass


def test_nothing_is_left_in_the_home_folder_and_nothing_else_is_asked(stub: HubStub, tmp_path: Path) -> None:
    """Whatever huggingface_hub would like to note or to report, for a person or for a machine."""
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    code = (
        "from edgespec import hub; from pathlib import Path\n"
        f"(file,) = hub.find({REPOSITORY!r}, '*.gguf')\n"
        f"hub.check_access(file); hub.download(file, Path({str(out)!r}))"
    )
    chosen = environment(stub, str(home)) | {"AI_AGENT": "one", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=chosen, check=True)
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert names(out) == ["model.gguf"]
    assert {request.path.split("/")[1] for request in stub.requests} == {"api", "owner", "cdn"}
    assert "/api/agent-harnesses" not in {request.path for request in stub.requests}

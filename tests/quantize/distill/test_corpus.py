"""Shards: what is written is read again, whole or with a clear word that it is damaged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import EdgespecError, FileAccessError, ModelFormatError, ParameterError
from quantize.distill.corpus import Corpus, CorpusWriter, Text, head_ids

WIDTH = 6
SETTINGS = {"seed": 3, "max_length": 64}


def text(number: int, *, task: str = "chat", num_tokens: int = 0) -> Text:
    random = np.random.default_rng(number)
    n = num_tokens or int(random.integers(2, 12))
    written = np.arange(n) >= n // 2
    hidden = random.integers(0, 2**16, (n, WIDTH)).astype(np.uint16)
    return Text(random.integers(0, 50, n).tolist(), written, hidden, task, number / 10)


def write(folder: Path, numbers: range, settings: dict[str, int] = SETTINGS) -> CorpusWriter:
    writer = CorpusWriter(folder, settings)
    for number in numbers:
        writer.add(text(number, task=("chat", "math")[number % 2]))
    writer.flush()
    return writer


def same(first: Text, second: Text) -> bool:
    arrays = np.array_equal(first.written, second.written) and np.array_equal(first.hidden, second.hidden)
    facts = (first.tokens, first.task, first.temperature) == (second.tokens, second.task, second.temperature)
    return arrays and facts


def test_texts_come_back(tmp_path: Path) -> None:
    write(tmp_path / "c", range(5))
    write(tmp_path / "c", range(5, 8))
    corpus = Corpus(tmp_path / "c")
    texts = [text(number, task=("chat", "math")[number % 2]) for number in range(8)]
    assert len(corpus) == 8
    assert corpus.num_shards == 2
    assert all(same(corpus.read(number), texts[number]) for number in (7, 0, 3, 4, 5, 6, 1, 2))
    assert [entry.num_tokens for entry in corpus.texts] == [len(one.tokens) for one in texts]
    assert corpus.num_tokens == sum(len(one.tokens) for one in texts)
    assert corpus.num_written == sum(int(one.written.sum()) for one in texts)
    assert corpus.tasks == ("chat", "math")
    assert corpus.num_texts_by_task == {"chat": 4, "math": 4}


def test_hidden_states_stay_on_disk(tmp_path: Path) -> None:
    write(tmp_path / "c", range(3))
    hidden = Corpus(tmp_path / "c").read(1).hidden
    assert isinstance(hidden, np.memmap) or isinstance(hidden.base, np.memmap)


def test_a_writer_says_where_it_goes_on(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path / "c", SETTINGS)
    assert (writer.num_shards, writer.num_texts, writer.num_written, writer.passages) == (0, 0, 0, [])
    writer.flush()  # nothing to write
    writer.add(text(0, num_tokens=10))
    writer.add_passage({"kind": "news", "title": "A", "text": "B"})
    assert Corpus(tmp_path / "c").num_shards == 0  # not before it is flushed
    writer.flush()
    for opened in (writer, CorpusWriter(tmp_path / "c", SETTINGS)):
        assert (opened.num_shards, opened.num_texts, opened.num_written) == (1, 1, 5)
        assert opened.num_written_by_task == {"chat": 5}
        assert opened.num_texts_by_task == {"chat": 1}
        assert opened.passages == [{"kind": "news", "title": "A", "text": "B"}]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "c", range(2))
    with pytest.raises(ParameterError, match=r"made with max_length 64, not 65; keep that setting"):
        CorpusWriter(tmp_path / "c", SETTINGS | {"max_length": 65})
    with pytest.raises(ParameterError, match="made with rows None, not 4"):
        CorpusWriter(tmp_path / "c", SETTINGS | {"rows": 4})


def test_a_killed_writer_loses_its_shard_only(tmp_path: Path) -> None:
    """It dies while a shard is half on disk; the next one takes the leftovers away and goes on."""
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from quantize.distill import corpus\n"
        "from tests.quantize.distill.test_corpus import SETTINGS, text, write\n"
        "write(Path(sys.argv[1]), range(3))\n"
        "corpus.file_sha256 = lambda path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write(Path(sys.argv[1]), range(3, 6))\n"
    )
    folder = tmp_path / "c"
    died = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=Path(__file__).parents[3], check=False)
    assert died.returncode == -signal.SIGKILL
    assert any(path.name.startswith(".") for path in folder.iterdir())
    assert len(Corpus(folder)) == 3
    writer = write(folder, range(3, 5))
    assert (writer.num_shards, len(Corpus(folder))) == (2, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.json", "shard-00000", "shard-00001"]


@pytest.mark.parametrize("name", ["tokens", "written", "hidden"])
@pytest.mark.parametrize("harm", ["a bit", "cut", "gone"])
def test_a_damaged_array_is_named(name: str, harm: str, tmp_path: Path) -> None:
    write(tmp_path / "c", range(3))
    path = tmp_path / "c" / "shard-00000" / f"{name}.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if harm == "a bit" else data[:-1])
    if harm == "gone":
        path.unlink()
    with pytest.raises(ModelFormatError, match=r"shard-00000 is damaged \(.*\); remove it") as raised:
        Corpus(tmp_path / "c").read(0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "texts": 3, "passages": [], "sha256": {}}'],
)
def test_a_damaged_description_is_named(content: str, tmp_path: Path) -> None:
    write(tmp_path / "c", range(3))
    (tmp_path / "c" / "shard-00000" / "shard.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelFormatError, match="shard-00000"):
        Corpus(tmp_path / "c")


def test_texts_outside_their_shard(tmp_path: Path) -> None:
    write(tmp_path / "c", range(3))
    path = tmp_path / "c" / "shard-00000" / "shard.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["texts"][2]["num_tokens"] += 1
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelFormatError, match="shard-00000 is damaged"):
        Corpus(tmp_path / "c")


def test_a_missing_shard_is_damage(tmp_path: Path) -> None:
    for start in (0, 2, 4):
        write(tmp_path / "c", range(start, start + 2))
    shutil.rmtree(tmp_path / "c" / "shard-00001")
    with pytest.raises(EdgespecError, match=r"shard-0000[12]"):
        Corpus(tmp_path / "c")


def test_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="cannot be read: No such file"):
        Corpus(tmp_path)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileAccessError, match="cannot be written"):
        write(tmp_path / "file" / "c", range(1))


def test_the_most_frequent_written_ids(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path / "c", SETTINGS)
    for tokens, num_given in (([9, 9, 9, 5, 5, 7], 3), ([7, 30, 4], 0)):
        n = len(tokens)
        writer.add(Text(tokens, np.arange(n) >= num_given, np.zeros((n, WIDTH), np.uint16), "chat", 0.0))
    writer.flush()
    corpus = Corpus(tmp_path / "c")
    assert head_ids(corpus, 2, (), 40).tolist() == [5, 7]
    assert head_ids(corpus, 4, {39, 1}, 40).tolist() == [1, 5, 7, 39]
    assert head_ids(corpus, 7, {39, 1}, 40).tolist() == [0, 1, 4, 5, 7, 30, 39]
    assert head_ids(corpus, 40, (), 40).tolist() == list(range(40))
    for num_ids in (0, 1, 41):
        with pytest.raises(ParameterError, match=f"got {num_ids} ids; allowed: 2"):
            head_ids(corpus, num_ids, {39, 1}, 40)

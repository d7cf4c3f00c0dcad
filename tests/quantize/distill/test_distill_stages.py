"""The whole distillation of a tiny verifier: what it makes, how it goes on, and what it refuses."""

from __future__ import annotations

import collections.abc as abc
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from edgespec.core.sequence import SamplingParams
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.errors import (
    EdgespecError,
    FileAccessError,
    MemoryBudgetError,
    ModelFormatError,
    ModelNotFoundError,
    ParameterError,
)
from edgespec.pairs.pair import check_draft_files
from quantize.distill import DistillResult, DistillSettings, checkpoint, distill, room
from quantize.distill.corpus import Corpus
from quantize.distill.decoder import Decoder
from quantize.distill.rounding import rounded_weights
from quantize.distill.settings import saved_settings
from quantize.distill.spent import Spent
from quantize.source import open_source
from tests.quantize.reference import Draft, Rows, relative_error
from tests.tiny import TinyConfig, write_gguf

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def one_thread() -> abc.Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another verifier."""
    return write_gguf(tmp_path_factory.mktemp("other") / "other.gguf", TinyConfig(seed=5))


def settings_of(verifier: Path, out: Path) -> DistillSettings:
    return DistillSettings(
        verifier, out, layers=1, head_vocab=200, tokens=50, epochs=3, batch_size=1, max_length=96, num_rows=4, threads=1
    )


@pytest.fixture(scope="module")
def made(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> DistillResult:
    return distill(settings_of(tiny_gguf, tmp_path_factory.mktemp("made") / "out"))


@pytest.fixture
def settings(tiny_gguf: Path, tmp_path: Path) -> DistillSettings:
    return settings_of(tiny_gguf, tmp_path / "out")


def weights(out: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.newest(out / "work" / "training")
    assert found is not None
    loaded: dict[str, torch.Tensor] = checkpoint.load(found)["weights"]
    return loaded


def same_weights(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def interrupted(settings: DistillSettings, stage: str, count: int = 1) -> None:
    """Ctrl-C at the count-th report of a stage."""
    left = count

    def progress(at: str, _: float) -> None:
        nonlocal left
        left -= at.partition(":")[0] == stage
        if left == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(settings, progress)


# ---------------------------------------------------------------------------------------------------------------- made


def test_it_makes_drafts_that_the_runtime_opens(made: DistillResult) -> None:
    assert set(made.drafts) == {"int8", "int4"}
    for draft in made.drafts.values():
        with contextlib.closing(OnnxDrafter.open(draft, num_ctx=64, num_threads=1)) as drafter:
            (proposed,) = drafter.propose([DraftRequest(0, [1, 70, 80], 3, 4, SamplingParams(temperature=0.0))])
        head = np.load(made.out / "work" / "head.npy").tolist()
        assert len(proposed.tokens) == 4
        assert set(proposed.tokens) <= set(head)
        manifest = (draft / "draft.toml").read_text()
        assert "num_layers = 1\n" in manifest
        assert made.checkpoint in manifest
    sizes = [sum(path.stat().st_size for path in draft.iterdir()) for draft in made.drafts.values()]
    assert sizes[0] > sizes[1]


def test_it_learns_and_says_what_it_did(made: DistillResult) -> None:
    first, last = made.history.points[0], made.history.points[-1]
    assert made.history.finished
    assert last.held_out_loss < first.held_out_loss
    settings = json.loads(json.dumps(made.settings))
    assert (settings["layers"], settings["tokens"], settings["seed"]) == ([0], 50, 0)
    assert settings["num_tokens_written"] >= 50
    assert sum(settings["num_tokens_by_task"].values()) == settings["num_tokens_written"]
    assert len(Corpus(made.out / "work" / "corpus")) == settings["num_texts"]


def test_progress_goes_through_the_stages(settings: DistillSettings) -> None:
    calls: list[tuple[str, float]] = []
    distill(settings, lambda stage, fraction: calls.append((stage.partition(":")[0], fraction)))
    stages = [stage for i, (stage, _) in enumerate(calls) if i == 0 or calls[i - 1][0] != stage]
    assert stages == ["generate", "train", "export"]
    for name in stages:
        fractions = [fraction for stage, fraction in calls if stage == name]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


def test_nothing_is_done_twice(made: DistillResult) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.out.rglob("*.npy")}
    before |= {path: path.stat().st_mtime_ns for path in made.out.rglob("model.onnx*")}
    again = distill(replace(settings_of(made.verifier, made.out), resume=True))
    assert again == made
    assert {path: path.stat().st_mtime_ns for path in before} == before


# --------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_killed_in_every_stage(made: DistillResult, settings: DistillSettings) -> None:
    content = {**settings.as_dict(), "out": str(settings.out)}
    for number, (stage, count) in enumerate([("generate", 30), ("train", 12), ("export", 4)]):
        given = json.dumps({**content, "resume": number > 0})
        command = [sys.executable, "-m", "tests.quantize.distill.killed_distill", given, stage, str(count)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    result = distill(replace(settings, resume=True))
    assert same_weights(settings.out, made.out)
    for name, draft in result.drafts.items():
        for file in ("model.onnx", "model.onnx.data", "d2t.npy"):
            assert (draft / file).read_bytes() == (made.drafts[name] / file).read_bytes()
    assert not list(settings.out.rglob(".*"))


@pytest.mark.parametrize(("stage", "count"), [("generate", 1), ("generate", 2), ("train", 1), ("export", 1)])
def test_interrupted_anywhere(stage: str, count: int, made: DistillResult, settings: DistillSettings) -> None:
    interrupted(settings, stage, count)
    distill(replace(settings, resume=True))
    assert same_weights(settings.out, made.out)


def test_more_of_it(made: DistillResult, settings: DistillSettings) -> None:
    short = distill(settings)
    longer = distill(replace(settings, epochs=6, tokens=900, resume=True))
    assert longer.history.points[-1].step > short.history.points[-1].step
    assert longer.settings["num_tokens_written"] >= 900
    assert longer.checkpoint != short.checkpoint
    for draft in longer.drafts.values():
        assert longer.checkpoint in (draft / "draft.toml").read_text()


def test_hours_bound_everything(settings: DistillSettings) -> None:
    start_s = time.monotonic()
    result = distill(replace(settings, tokens=None, epochs=None, hours=8 / 3600))
    assert result.history.finished
    assert result.history.points[-1].held_out_loss < result.history.points[0].held_out_loss
    spent = Spent.read(settings.work / "spent.json")
    assert spent.text_s > 0
    assert spent.training_h is not None
    assert spent.text_s + 3600 * spent.training_h < 8 * 1.5
    assert time.monotonic() - start_s < 60


# ------------------------------------------------------------------------------------------------------------- refused


def one_line(error: BaseException) -> str:
    assert isinstance(error, EdgespecError)
    assert "\n" not in str(error)
    return str(error)


def test_a_folder_that_is_there(made: DistillResult, tmp_path: Path) -> None:
    settings = settings_of(made.verifier, made.out)
    with pytest.raises(FileAccessError, match=r"exists; go on with it \(--resume\), replace it \(--force\)"):
        distill(settings)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for other in (replace(settings, out=tmp_path / "mine", force=True), replace(settings, out=tmp_path / "mine")):
        with pytest.raises(FileAccessError, match="is not of a distillation, so it is left alone"):
            distill(other)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_force_begins_anew(settings: DistillSettings) -> None:
    interrupted(settings, "train")
    (settings.out / "draft-int8").mkdir()
    result = distill(replace(settings, seed=5, force=True))
    assert result.settings["seed"] == 5
    interrupted(replace(settings, force=True, tokens=10), "generate", 2)


def test_force_removes_what_was_made_only(settings: DistillSettings) -> None:
    interrupted(settings, "generate", 2)
    mine = [settings.out / "thesis.txt", settings.work / "notes.md"]
    for path in mine:
        path.write_text("years of work")
    interrupted(replace(settings, seed=5, force=True), "generate", 2)
    assert [path.read_text() for path in mine] == ["years of work"] * 2
    (settings.work / "settings.json").write_text("{}")  # another program's, as far as anybody can tell
    with pytest.raises(FileAccessError, match=r"holds thesis.txt and no readable work/settings.json") as e:
        distill(replace(settings, force=True))
    one_line(e.value)
    for path in mine:
        path.unlink()
    interrupted(replace(settings, force=True), "generate", 2)


def test_force_removes_nothing_before_all_is_known_to_be_right(settings: DistillSettings, tmp_path: Path) -> None:
    interrupted(settings, "train")
    before = sorted(settings.out.rglob("*"))
    with pytest.raises(FileAccessError, match="cannot be read"):
        distill(replace(settings, force=True, prompts=tmp_path / "none.jsonl"))
    assert sorted(settings.out.rglob("*")) == before


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_one_at_a_time(settings: DistillSettings) -> None:
    refused: list[EdgespecError] = []

    def progress(stage: str, _: float) -> None:
        for force in (False, True):
            if stage.startswith("train") and len(refused) < 2:
                with pytest.raises(FileAccessError, match="is being worked in by another distillation") as e:
                    distill(replace(settings, resume=not force, force=force))
                refused.append(e.value)

    distill(settings, progress)
    assert len(refused) == 2
    one_line(refused[0])


def test_force_never_removes_the_verifier(settings: DistillSettings) -> None:
    interrupted(settings, "generate", 2)
    inside = settings.out / "verifier.gguf"
    inside.write_bytes(settings.verifier.read_bytes())
    with pytest.raises(FileAccessError, match="never removed"):
        distill(replace(settings, verifier=inside, force=True))
    assert inside.is_file()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers", 2),
        ("head_vocab", 100),
        ("batch_size", 2),
        ("learning_rate", 0.5),
        ("max_length", 100),
        ("hidden_weight", 1.0),
        ("block_size", 64),
        ("num_rows", 5),
        ("seed", 9),
        ("tokens", 40),
        ("epochs", 1),
    ],
)
def test_other_settings_are_refused_by_name(made: DistillResult, name: str, value: float) -> None:
    other = replace(settings_of(made.verifier, made.out), resume=True)
    with pytest.raises(ParameterError, match=f"^{name}: got {value}, this was begun with") as e:
        distill(replace(other, **{name: value}))  # type: ignore[arg-type]
    one_line(e.value)


def test_hours_instead_of_epochs_are_refused(made: DistillResult) -> None:
    other = replace(settings_of(made.verifier, made.out), resume=True, hours=1.0, epochs=None)
    with pytest.raises(ParameterError, match=r"^hours: got 1.0, this was begun without") as e:
        distill(other)
    one_line(e.value)


def test_another_verifier_is_refused(made: DistillResult, other: Path) -> None:
    with pytest.raises(ParameterError, match=r"^verifier_sha256: got"):
        distill(replace(settings_of(other, made.out), resume=True))


def test_a_verifier_that_moved(made: DistillResult, tmp_path: Path) -> None:
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(made.verifier.read_bytes())
    result = distill(replace(settings_of(moved, made.out), resume=True))
    assert result.checkpoint == made.checkpoint


def test_settings_of_an_earlier_sitting(settings: DistillSettings) -> None:
    interrupted(settings, "generate", 2)
    saved = saved_settings(settings.out, {"epochs": 5.0})
    assert replace(saved, num_rows=4) == replace(
        settings, epochs=5.0, resume=True, verifier=settings.verifier.absolute()
    )
    with pytest.raises(FileAccessError, match="nothing to go on with"):
        saved_settings(settings.out.parent, {})
    (settings.work / "settings.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"damaged; begin anew with --force"):
        saved_settings(settings.out, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 9}, "layers: got 9 of them; allowed: 1 to 2"),
        ({"layers": (0, 5)}, r"layers: got \[0, 5\]"),
        ({"max_length": 5}, "max_length: got 5"),
        ({"head_vocab": 2}, "head_vocab: got 2; allowed: 3"),
        ({"device": "cuda"}, "device: got cuda, but torch finds no CUDA device"),
    ],
)
def test_what_cannot_be(settings: DistillSettings, change: dict[str, object], message: str) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ParameterError, match=message) as e:
        distill(replace(settings, **change))  # type: ignore[arg-type]
    one_line(e.value)
    assert not settings.out.exists()


def test_no_verifier(settings: DistillSettings, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model file at"):
        distill(replace(settings, verifier=tmp_path / "none.gguf"))
    (tmp_path / "half.gguf").write_bytes(settings.verifier.read_bytes()[:3000])
    with pytest.raises(ModelFormatError):
        distill(replace(settings, verifier=tmp_path / "half.gguf"))
    assert not settings.out.exists()


def test_no_room(settings: DistillSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileAccessError, match=r"takes about .* GB more, .* GB are free; free space") as e:
        distill(replace(settings, tokens=10**15))
    one_line(e.value)
    monkeypatch.setattr(room, "usable_memory", lambda: (1 << 30, 1 << 20))
    with pytest.raises(MemoryBudgetError, match=r"takes about .* GB of memory, .* GB are free") as memory:
        distill(settings)
    one_line(memory.value)
    assert not settings.out.exists()


@pytest.mark.parametrize("damaged", ["shard", "checkpoint", "head", "spent"])
def test_damage_is_refused_with_a_way_out(damaged: str, settings: DistillSettings) -> None:
    interrupted(settings, "export")
    pattern = {
        "shard": "corpus/*/hidden.npy",
        "checkpoint": "training/step-*",
        "head": "head.npy",
        "spent": "spent.json",
    }
    path = max(settings.work.glob(pattern[damaged]))
    content = path.read_bytes()
    path.write_bytes(content[:-20] + b"x" * 20 if damaged == "shard" else content[: len(content) // 2])
    if damaged == "shard":  # what is trained needs no text, more training does
        settings = replace(settings, epochs=5)
    with pytest.raises(ModelFormatError, match=r"damaged.*(delete|remove|begin anew)") as e:
        distill(replace(settings, resume=True))
    one_line(e.value)


@pytest.mark.parametrize("change", ["gone", "another"])
def test_a_head_that_is_not_the_trained_one(change: str, settings: DistillSettings) -> None:
    """Its ids are what the rows of the weights stand for."""
    interrupted(settings, "export")
    path = settings.work / "head.npy"
    ids = np.load(path)
    path.unlink()
    if change == "another":
        unused = next(i for i in range(ids[-1]) if i not in ids)
        np.save(path, np.sort(np.append(ids[1:], unused)))
    with pytest.raises(ModelFormatError, match=r"head.npy is (gone|damaged).*begin anew with --force") as e:
        distill(replace(settings, resume=True))
    one_line(e.value)


def test_text_that_was_lost_is_written_again(made: DistillResult, settings: DistillSettings) -> None:
    interrupted(settings, "export")
    shutil.rmtree(max((settings.work / "corpus").glob("shard-*")))
    distill(replace(settings, resume=True))
    assert same_weights(settings.out, made.out)


@pytest.mark.parametrize("damage", ["half", "gone", "changed", "manifest"])
def test_a_damaged_draft_is_made_again(damage: str, made: DistillResult, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made.out, out)
    path = out / "draft-int4" / ("draft.toml" if damage == "manifest" else "model.onnx.data")
    content = path.read_bytes()
    path.write_bytes({"half": content[: len(content) // 2], "manifest": b"\xff"}.get(damage, b"x" + content[1:]))
    if damage == "gone":
        path.unlink()
    distill(replace(settings_of(made.verifier, out), resume=True))
    assert path.read_bytes() == content or damage == "manifest"
    check_draft_files(out / "draft-int4", "")


# -------------------------------------------------------------------------------------------------------------- choices


def test_a_whole_head(settings: DistillSettings) -> None:
    result = distill(replace(settings, head_vocab=0))
    assert not (settings.work / "head.npy").exists()
    assert "d2t" not in (result.drafts["int8"] / "draft.toml").read_text()


@pytest.mark.parametrize(("block_size", "other_size"), [(32, 64), (64, 32)])
def test_the_draft_is_what_was_trained(block_size: int, other_size: int, settings: DistillSettings) -> None:
    """Its weights are the trained ones rounded as in the training, its embedding the one that was read there."""
    result = distill(replace(settings, block_size=block_size))
    rows = Draft(result.drafts["int4"]).rows(range(3, 60), 1)
    assert relative_error(rows, rounded_rows(result, block_size)) < 0.05
    assert relative_error(rows, rounded_rows(result, other_size)) > 0.1
    for draft in result.drafts.values():
        assert f"block_size = {block_size}\nembedding_bits = 4\n" in (draft / "draft.toml").read_text()
    assert 0 < (result.history.rounded_from or 0) < result.history.num_steps


@torch.no_grad()
def rounded_rows(made: DistillResult, block_size: int) -> Rows:
    head = np.load(made.out / "work" / "head.npy")
    student = Decoder.of(open_source(made.verifier), [0], head=head, embedding_bits=4, block_size=block_size)
    student.load_state_dict(weights(made.out))
    with rounded_weights(student, block_size):
        rows: Rows = student.logits(student(torch.arange(3, 60)[None]))[0].numpy()
    return rows

"""The torch decoder computes what the ONNX graph computes from the same source, with a cache and without."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from edgespec.errors import ParameterError
from quantize import build_draft
from quantize.distill.attention import attend
from quantize.distill.cache import Cache
from quantize.distill.decoder import Decoder
from quantize.source import open_source
from tests.quantize.reference import Draft, Rows, relative_error
from tests.quantize.test_draft_architectures import ARCHITECTURES, CASES, TOKENS
from tests.tiny import TinyConfig, write_gguf
from tests.tiny_hf import write_checkpoint

HEAD = np.array([0, 1, 2, 5, 17, 300, 319])
TEXT = torch.tensor([TOKENS])

# Six layers of Gemma: five see a window, one all.
SMALL = ARCHITECTURES | {"gemma3": replace(ARCHITECTURES["gemma3"], num_layers=6)}
# Frequencies and magnitudes of ropes, each once; elsewhere every architecture is tested with every one.
ROPES = ("llama, yarn, longer vectors", "qwen3, linear", "gemma3, yarn, longer vectors", "gemma3, no window")
GRAPHS = {name: CASES[name] for name in ROPES} | {f"{name}, tied": CASES[f"{name}, tied"] for name in ARCHITECTURES}
GRAPHS |= ARCHITECTURES


@torch.no_grad()
def rows_of(decoder: Decoder, tokens: Tensor = TEXT) -> Rows:
    return np.asarray(decoder.logits(decoder(tokens))[0].numpy())


def opened(folder: Path, config: TinyConfig) -> Decoder:
    return Decoder.of(open_source(write_gguf(folder / "source.gguf", config)))


@pytest.fixture(params=list(SMALL))
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    return opened(tmp_path, SMALL[request.param])


# ----------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("config", GRAPHS.values(), ids=GRAPHS)
def test_a_decoder_equals_the_graph_of_its_gguf(config: TinyConfig, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", config)
    expected = Draft(build_draft(source, tmp_path / "draft", bits=32)).rows(TOKENS, 1)
    assert relative_error(rows_of(Decoder.of(open_source(source))), expected) < 2e-5


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_decoder_equals_the_graph_of_its_checkpoint(config: TinyConfig, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", config)
    expected = Draft(build_draft(source, tmp_path / "draft", bits=32)).rows(TOKENS, 1)
    assert relative_error(rows_of(Decoder.of(open_source(source))), expected) < 2e-5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("name", "layers"), [("llama", (1,)), ("qwen3", (1, 0)), ("gemma3", (5, 0, 3))])
def test_some_layers_and_a_head_of_some_ids(name: str, layers: tuple[int, ...], tied: bool, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "source.gguf", replace(ARCHITECTURES[name], tied=tied))
    folder = build_draft(source, tmp_path / "draft", bits=32, layers=layers, head=HEAD.tolist())
    student = Decoder.of(open_source(source), layers, head=HEAD)
    assert student.dimensions.num_layers == len(layers)
    assert relative_error(rows_of(student), Draft(folder).rows(TOKENS, 1)) < 2e-5


def test_what_is_trained_is_what_is_saved(tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf", TinyConfig(tied=True)))
    student = Decoder.of(source, [1], head=HEAD)
    assert set(student.state_dict()) == {name for name, _ in student.named_parameters()}
    assert {"head", "output_norm", "layers.0.attn_qkv", "layers.0.ffn_gate_up"} <= set(student.state_dict())
    assert student.head is not None
    np.testing.assert_array_equal(student.head.detach(), student.embedding[HEAD])
    assert Decoder.of(source).head is None


def test_a_decoder_of_half_precision_is_close(tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf"))
    exact, half = Decoder.of(source), Decoder.of(source, dtype=torch.bfloat16)
    assert half(TEXT).dtype == torch.bfloat16
    assert 0.0 < relative_error(half(TEXT).float().detach().numpy(), exact(TEXT).detach().numpy()) < 0.05
    with torch.autocast("cpu", torch.bfloat16):
        mixed = exact(TEXT)
    assert mixed.dtype == torch.float32
    assert 0.0 < relative_error(mixed.detach().numpy(), exact(TEXT).detach().numpy()) < 0.05


@pytest.mark.parametrize("layers", [[], [2], [-1], [0, 0]])
def test_layers_that_are_not_there(layers: list[int], tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf"))
    with pytest.raises(ParameterError, match="one or more of 0 to 1, each once"):
        Decoder.of(source, layers)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ([], "one or more of 0 to 319"),
        ([320], "one or more of 0 to 319"),
        ([-1, 4], "one or more of 0 to 319"),
        ([4, 2], "sort"),
        ([4, 4], "twice"),
    ],
)
def test_ids_that_are_not_there(head: list[int], message: str, tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "source.gguf"))
    with pytest.raises(ParameterError, match=message):
        Decoder.of(source, head=np.array(head, dtype=np.int64))


# ----------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("steps", [(150,), (1,) * 20, (5, 1, 34, 1, 70), (64, 1, 63, 1)], ids=len)
@torch.no_grad()
def test_a_cache_changes_nothing(decoder: Decoder, steps: tuple[int, ...]) -> None:
    cache, found = Cache(decoder, 1, 150), []
    for part in torch.split(TEXT[:, : sum(steps)], list(steps), dim=1):
        found.append(decoder(part, cache))
    assert cache.lengths.tolist() == [sum(steps)]
    expected = decoder(TEXT[:, : sum(steps)])
    assert relative_error(torch.cat(found, 1).numpy(), expected.numpy()) < 1e-5


@torch.no_grad()
def test_rows_of_any_length_do_not_touch_each_other(decoder: Decoder) -> None:
    """Ragged from the first call on: padded, some rows only, in another order, none at all, and emptied in between."""
    texts = [torch.tensor(TOKENS[i:]) for i in (0, 31, 62)]
    cache, heard = Cache(decoder, 3, 100), [torch.zeros(0, decoder.dimensions.width)] * 3
    fed = [0, 0, 0]

    def feed(counts: list[int], rows: list[int] | None = None, cleared: int | None = None) -> None:
        if cleared is not None:
            cache.clear([cleared])
            fed[cleared], heard[cleared] = 0, heard[cleared][:0]
        own, length = rows or [0, 1, 2], max(counts)
        tokens = torch.full((len(own), length), 7)
        for place, (row, count) in enumerate(zip(own, counts, strict=True)):
            tokens[place, :count] = texts[row][fed[row] : fed[row] + count]
        hidden = decoder(tokens, cache, torch.tensor(counts), None if rows is None else torch.tensor(rows))
        for place, (row, count) in enumerate(zip(own, counts, strict=True)):
            heard[row] = torch.cat([heard[row], hidden[place, :count]])
            fed[row] += count

    feed([3, 20, 11])
    feed([1, 1, 1])
    feed([40, 0, 7])
    feed([9, 2], rows=[2, 0])
    feed([12], rows=[1], cleared=1)
    feed([1, 1, 1])
    feed([5, 0, 30], cleared=0)
    assert cache.lengths.tolist() == fed == [5, 13, 59]
    for text, got in zip(texts, heard, strict=True):
        assert relative_error(got[None].numpy(), decoder(text[None, : len(got)]).numpy()) < 1e-5


@torch.no_grad()
def test_a_row_is_trimmed_by_a_smaller_length(decoder: Decoder) -> None:
    cache = Cache(decoder, 2, 64)
    decoder(TEXT[:, :40].repeat(2, 1), cache)
    cache.lengths[1] = 12
    hidden = decoder(torch.stack([TEXT[0, 40:44], TEXT[0, 12:16]]), cache)
    assert relative_error(hidden[1:].numpy(), decoder(TEXT[:, :16])[:, 12:].numpy()) < 1e-5
    assert relative_error(hidden[:1].numpy(), decoder(TEXT[:, :44])[:, 40:].numpy()) < 1e-5


@torch.no_grad()
def test_a_full_cache_refuses_and_stays_as_it_was(tmp_path: Path) -> None:
    decoder = opened(tmp_path, TinyConfig())
    cache = Cache(decoder, 2, 10)
    decoder(TEXT[:, :8].repeat(2, 1), cache, torch.tensor([8, 3]))
    with pytest.raises(ValueError, match="room for 10 tokens a row; 11 do not fit"):
        decoder(TEXT[:, :3].repeat(2, 1), cache)
    assert cache.lengths.tolist() == [8, 3]
    decoder(TEXT[:, :3].repeat(2, 1), cache, torch.tensor([2, 3]))
    assert cache.lengths.tolist() == [10, 6]


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize(("window", "length"), [(0, 5), (0, 128), (0, 300), (7, 300), (200, 300), (1, 130)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_attention_and_its_gradient_equal_torchs_own(window: int, length: int, num_kv_heads: int) -> None:
    random = torch.Generator().manual_seed(length + window)
    shapes = [(2, length, heads, 4) for heads in (6, num_kv_heads, num_kv_heads)]
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]
    arriving = torch.randn((2, length, 24), generator=random, dtype=torch.float64)
    positions = torch.arange(length)
    seen = positions[None] <= positions[:, None]
    if window:
        seen &= positions[None] > positions[:, None] - window
    queries, keys, values = (x.transpose(1, 2) for x in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, seen, scale=0.3, enable_gqa=True
    ).transpose(1, 2).flatten(2)  # fmt: skip
    found = attend(inputs[0], inputs[1], inputs[2], window, 0.3)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(output, inputs, arriving) for output in (found, expected)]
    for got, own in zip(*gradients, strict=True):
        torch.testing.assert_close(got, own)


def test_every_parameter_has_the_gradient_that_a_small_step_shows(decoder: Decoder) -> None:
    """By central differences along the gradient, in float32, so not to many digits."""
    tokens, random = TEXT[:, :40], torch.Generator().manual_seed(0)
    wanted = torch.randn(40, decoder.dimensions.num_vocab, generator=random) / 40

    def loss() -> Tensor:
        return (decoder.logits(decoder(tokens))[0] * wanted).double().sum()

    loss().backward()  # type: ignore[no-untyped-call]
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        slope, own = parameter.grad.norm(), parameter.detach().clone()
        step, losses = 1e-3 * own.norm(), []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.copy_(own + sign * step * parameter.grad / slope)
                losses.append(float(loss()))
        parameter.data.copy_(own)
        assert (losses[0] - losses[1]) / (2 * float(step)) == pytest.approx(float(slope), rel=0.02), name


def test_padding_after_a_text_changes_nothing_in_it(decoder: Decoder) -> None:
    padded = torch.cat([TEXT[:, :30], torch.full((1, 9), 3)], dim=1)
    for tokens in (padded, TEXT[:, :39]):
        torch.testing.assert_close(decoder(tokens)[:, :30], decoder(TEXT[:, :30]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
def test_a_student_learns(mixed: bool, tmp_path: Path) -> None:
    """Its loss falls to a small part of what it was, of every architecture."""
    for config in SMALL.values():
        source = open_source(write_gguf(tmp_path / f"{config.architecture}.gguf", config))
        student = Decoder.of(source, [0], head=np.arange(320))
        optimizer, losses = torch.optim.AdamW(student.parameters(), lr=3e-3), []
        for _ in range(30):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                logits = student.logits(student(TEXT[:, :-1]))[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), TEXT[0, 1:])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.2 * losses[0]


def test_every_case_is_another_model(tmp_path: Path) -> None:
    """What a test above varies must show in the hidden states, or it would prove nothing."""
    rows = [
        rows_of(opened(tmp_path, config))
        for config in (*SMALL.values(), replace(SMALL["gemma3"], window=0), TinyConfig(rope_linear=4.0))
    ]
    for first, second in itertools.combinations(rows, 2):
        assert relative_error(first, second) > 3e-3

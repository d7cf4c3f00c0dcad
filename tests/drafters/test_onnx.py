"""OnnxDrafter beyond the contract: right numbers, trimmed heads, ends of contexts, published exports."""

from __future__ import annotations

import collections.abc as abc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from edgespec.core.head import Head
from edgespec.core.sampling import Stream, distribution, pick
from edgespec.core.sequence import SamplingParams
from edgespec.drafters import vocabulary
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.onnx import OnnxDrafter
from edgespec.drafters.onnx_fixed import aligned, spans
from edgespec.errors import BackendError, ParameterError
from tests.drafters.conftest import HEAD, TINY
from tests.drafters.test_contract import GREEDY, LONG, PROMPT, ask, same
from tests.tiny import token_strings

REJECTION = SamplingParams(seed=11, rule="rejection", repeat_penalty=1.2, presence_penalty=-6.0)
COUPLED = SamplingParams(seed=11, presence_penalty=-6.0)


def open_onnx(path: Path, *, num_ctx: int = 200, num_slots: int = 1, num_vocab: int | None = None) -> OnnxDrafter:
    return OnnxDrafter.open(path, num_ctx=num_ctx, num_threads=1, num_slots=num_slots, num_vocab=num_vocab)


@pytest.fixture(scope="session")
def reference(usual_folder: Path) -> abc.Callable[[abc.Sequence[int]], np.ndarray]:
    """The logits after a token list, by one plain call without a cache."""
    session = ort.InferenceSession(usual_folder / "model.onnx", providers=["CPUExecutionProvider"])
    empty = np.zeros((1, TINY.num_kv_heads, 0, TINY.head_size), dtype=np.float32)
    past = {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}

    def logits(tokens: abc.Sequence[int]) -> np.ndarray:
        ids = np.asarray([tokens])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
        return session.run(["logits"], feeds | past)[0][0, -1]

    return logits


@pytest.mark.parametrize("form", ["own", "trimmed", "usual"])
@pytest.mark.parametrize("prompt", [PROMPT, LONG + PROMPT], ids=["short", "chunked"])
def test_draws_from_the_models_own_distributions(
    form: str, prompt: list[int], reference: Any, request: pytest.FixtureRequest
) -> None:
    drafter = open_onnx(request.getfixturevalue(f"{form}_folder"))
    draft, coupled = ask(drafter, prompt, 6, REJECTION), ask(drafter, prompt, 6, COUPLED)
    ids = np.sort(HEAD) if form == "trimmed" else np.arange(TINY.num_vocab)
    assert draft.distributions is not None
    for i, dist in enumerate(draft.distributions):
        prefix = [*prompt, *coupled.tokens[:i]]
        expected = distribution(reference(prefix)[ids], COUPLED, prefix, 2, Head(ids))
        assert coupled.tokens[i] == pick(expected, COUPLED, len(prefix), Stream.DRAFT)
        prefix = [*prompt, *draft.tokens[:i]]
        expected = distribution(reference(prefix)[ids], REJECTION, prefix, 2, Head(ids))
        assert draft.tokens[i] == pick(expected, REJECTION, len(prefix), Stream.DRAFT)
        np.testing.assert_array_equal(dist.ids, expected.ids)
        np.testing.assert_allclose(dist.probs, expected.probs, atol=1e-4)


@pytest.mark.parametrize("form", ["own", "trimmed", "usual"])
def test_greedy_takes_the_most_likely_token(form: str, reference: Any, request: pytest.FixtureRequest) -> None:
    drafter = open_onnx(request.getfixturevalue(f"{form}_folder"))
    spoken = np.sort(HEAD) if form == "trimmed" else np.arange(TINY.num_vocab)
    known = list(PROMPT)
    for token in ask(drafter, PROMPT, 8).tokens:
        assert token == spoken[reference(known)[spoken].argmax()]
        known.append(token)


@pytest.mark.parametrize("form", ["own", "trimmed", "usual"])
@pytest.mark.parametrize("params", [GREEDY, REJECTION, SamplingParams(seed=1, top_k=0, top_p=1.0, min_p=0.0)])
def test_never_drafts_what_the_verifier_lacks(form: str, params: Any, request: pytest.FixtureRequest) -> None:
    folder, num_vocab = request.getfixturevalue(f"{form}_folder"), 60
    drafter = open_onnx(folder, num_vocab=num_vocab)
    drafted = {t for i in range(20) for t in ask(drafter, [1, i + 3], 8, params).tokens}
    assert max(drafted) < num_vocab
    unlimited = {t for i in range(20) for t in ask(open_onnx(folder), [1, i + 3], 8, params).tokens}
    assert max(unlimited) >= num_vocab


def test_a_head_in_any_order_is_the_same_head(trimmed_folder: Path, tmp_path: Path) -> None:
    """Permute the logits and d2t alike."""
    folder = shutil.copytree(trimmed_folder, tmp_path / "draft")
    d2t, order = np.load(folder / "d2t.npy"), np.random.default_rng(0).permutation(len(HEAD))
    np.save(folder / "d2t.npy", d2t[order])
    edit(folder / "model.onnx", lambda graph: _permute_logits(graph, order))
    for params in (GREEDY, REJECTION):
        assert same(ask(open_onnx(folder), PROMPT, 8, params), ask(open_onnx(trimmed_folder), PROMPT, 8, params))


@pytest.mark.parametrize("form", ["own", "usual"])
def test_the_context_ends(form: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{form}_folder")
    whole = ask(open_onnx(folder), PROMPT, 9).tokens
    drafter = open_onnx(folder, num_ctx=len(PROMPT) + 4)
    assert ask(drafter, PROMPT, 9).tokens == whole[:4]
    assert ask(drafter, [*PROMPT, *whole[:3]], 9).tokens == whole[3:4]
    assert ask(drafter, [*PROMPT, *whole[:4]], 9).tokens == ()
    assert ask(drafter, LONG, 9).tokens == ()
    assert ask(drafter, PROMPT, 9).tokens == whole[:4]


@pytest.mark.parametrize("form", ["own", "usual"])
def test_the_models_own_limit_holds(form: str, request: pytest.FixtureRequest) -> None:
    drafter = open_onnx(request.getfixturevalue(f"{form}_folder"), num_ctx=100_000)
    assert drafter.num_ctx == TINY.num_ctx
    tokens = (LONG * 2)[: TINY.num_ctx - 2]
    assert len(ask(drafter, tokens, 9).tokens) == 2


def test_a_full_idle_slot_inside_a_batch_keeps_its_cache(own_folder: Path) -> None:
    num_ctx = len(PROMPT) + 3
    drafter = open_onnx(own_folder, num_ctx=num_ctx, num_slots=3)
    full = ask(drafter, PROMPT, 9, slot=1)
    assert len(drafter._cached[1]) == num_ctx - 1
    before = {name: cache[1, :, : num_ctx - 1].copy() for name, cache in drafter._model._caches.items()}
    ask_two = [DraftRequest(slot, PROMPT[:3], 2, 5, GREEDY) for slot in (0, 2)]
    assert [draft.tokens for draft in drafter.propose(ask_two)] == [
        ask(open_onnx(own_folder), PROMPT[:3], 5).tokens
    ] * 2
    for name, cache in drafter._model._caches.items():
        np.testing.assert_array_equal(cache[1, :, : num_ctx - 1], before[name])
    assert same(ask(drafter, PROMPT, 9, slot=1), full)


@pytest.mark.parametrize("form", ["own", "usual"])
@pytest.mark.parametrize("token", [TINY.num_vocab, TINY.num_vocab + 5000, -1])
def test_tokens_the_model_cannot_read_get_an_empty_draft(form: str, token: int, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(f"{form}_folder")
    drafter = open_onnx(folder, num_slots=2)
    whole = ask(drafter, PROMPT).tokens
    odd = DraftRequest(0, [*PROMPT[:3], token, *PROMPT[3:]], 2, 6, GREEDY)
    assert [d.tokens for d in drafter.propose([odd, DraftRequest(1, PROMPT, 2, 6, GREEDY)])] == [(), whole]
    assert ask(drafter, PROMPT).tokens == whole


def test_only_what_is_missing_is_evaluated(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, calls = open_onnx(own_folder), []
    extend, step = drafter._model.extend, drafter._model.step
    monkeypatch.setattr(drafter._model, "extend", lambda *args: (calls.append(len(args[1])), extend(*args))[1])
    monkeypatch.setattr(drafter._model, "step", lambda *args: (calls.append(1), step(*args))[1])

    def evaluated(tokens: list[int], num_draft: int) -> list[int]:
        calls.clear()
        drafted.append(ask(drafter, tokens, num_draft).tokens)
        return list(calls)

    drafted: list[tuple[int, ...]] = []
    assert evaluated(PROMPT, 4) == [7, 1, 1, 1]
    accepted = [*PROMPT, *drafted[-1]]
    assert evaluated([*accepted, 5], 3) == [2, 1, 1]  # the last drafted token and the bonus token
    assert evaluated([*accepted[:-2], 9], 1) == [1]  # cut back to what was accepted
    assert evaluated(LONG, 2) == [128, 32, 1]
    assert evaluated(LONG, 1) == [1]


def test_a_failure_is_one_line_and_leaves_the_cache_right(own_folder: Path) -> None:
    class Broken:
        def run_with_iobinding(self, binding: Any) -> None:
            raise RuntimeError(
                "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code\nwhile running\nGather"
            )

    drafter = open_onnx(own_folder)
    whole = ask(drafter, PROMPT).tokens
    session, drafter._model._session = drafter._model._session, Broken()
    with pytest.raises(BackendError, match="ONNX Runtime failed: Non-zero status code while running Gather;"):
        ask(drafter, [*PROMPT[:4], 9])
    drafter._model._session = session
    assert ask(drafter, PROMPT).tokens == whole
    assert same(ask(drafter, [*PROMPT[:4], 9]), ask(open_onnx(own_folder), [*PROMPT[:4], 9]))


def test_requests_outside_the_bounds(own_folder: Path) -> None:
    drafter = open_onnx(own_folder, num_slots=2)
    with pytest.raises(ParameterError, match=r"slots: got \[1, 1\]; allowed: different ones from 0 to 1"):
        drafter.propose([DraftRequest(1, PROMPT, 2, 1, GREEDY)] * 2)
    with pytest.raises(ParameterError, match="empty list"):
        ask(drafter, [])
    with pytest.raises(ParameterError, match="num_threads: got 0; allowed: a whole number of 1 or more"):
        OnnxDrafter.open(own_folder, num_ctx=10, num_threads=0)


def test_nothing_reaches_the_terminal(own_folder: Path, usual_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in (own_folder, usual_folder):
        ask(open_onnx(folder), PROMPT)
    assert capfd.readouterr() == ("", "")


def test_token_lists(own_folder: Path, usual_folder: Path) -> None:
    own, usual = open_onnx(own_folder), open_onnx(usual_folder)
    assert list(own.tokens) == token_strings(TINY.num_vocab)
    assert list(usual.tokens) == token_strings(0)
    for drafter in (own, usual):
        vocabulary.check(drafter.tokens, token_strings(TINY.num_vocab))


def test_a_folder_or_its_model_file(own_folder: Path, usual_folder: Path, tmp_path: Path) -> None:
    whole = ask(open_onnx(own_folder), PROMPT)
    assert same(ask(open_onnx(own_folder / "model.onnx"), PROMPT), whole)
    assert same(ask(open_onnx(usual_folder / "model.onnx"), PROMPT), whole)
    shutil.copytree(usual_folder, tmp_path / "hub" / "onnx")
    shutil.move(tmp_path / "hub" / "onnx" / "tokenizer.json", tmp_path / "hub")
    hub = open_onnx(tmp_path / "hub")
    assert same(ask(hub, PROMPT), whole)
    assert hub.tokens == open_onnx(usual_folder).tokens


def test_aligned_memory() -> None:
    for shape in [(), (3,), (5, 2, 7), (1, 1)]:
        memory = aligned(shape, np.int32)
        assert memory.shape == shape
        assert memory.ctypes.data % 64 == 0
        assert not memory.any()


def test_spans() -> None:
    assert spans([], 3) == []
    assert spans([2], 3) == [(2, 2)]
    assert spans([0, 1, 5, 10, 11], 3) == [(0, 5), (10, 11)]
    assert spans([0, 2], 0) == [(0, 0), (2, 2)]


# Published exports differ in detail: each variant is the tiny export, changed.


def edit(path: Path, change: abc.Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)


def rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """The node output ``old`` becomes ``new``, for whoever reads it too."""
    for node in graph.node:
        node.output[:] = [new if name == old else name for name in node.output]
        node.input[:] = [new if name == old else name for name in node.input]


def _permute_logits(graph: onnx.GraphProto, order: np.ndarray) -> None:
    rename(graph, "logits", "plain_logits")
    graph.initializer.append(onnx.numpy_helper.from_array(order.astype(np.int64), "order"))
    graph.node.append(helper.make_node("Gather", ["plain_logits", "order"], ["logits"], axis=2))


def last_logits_only(graph: onnx.GraphProto) -> None:
    rename(graph, "logits", "all_logits")
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "last"))
    graph.node.append(helper.make_node("Gather", ["all_logits", "last"], ["logits"], axis=1))
    graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1


def num_logits_to_keep(graph: onnx.GraphProto) -> None:
    """As in transformers' own exports: a scalar input that says how many rows are wanted."""
    graph.input.append(helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []))
    rename(graph, "logits", "all_logits")
    constants = {"end": [2**62], "axis": [1], "one": [1]}
    graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v), k) for k, v in constants.items())
    graph.node.append(helper.make_node("Neg", ["num_logits_to_keep"], ["first"]))
    graph.node.append(helper.make_node("Reshape", ["first", "one"], ["start"]))
    graph.node.append(helper.make_node("Slice", ["all_logits", "start", "end", "axis"], ["logits"]))


def half_precision_caches(graph: onnx.GraphProto) -> None:
    for value in [*graph.input, *graph.output]:
        if not value.name.startswith(("past", "present")):
            continue
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
        inner, outer = f"{value.name}.float", value.name
        if outer.startswith("past"):
            for node in graph.node:
                node.input[:] = [inner if name == outer else name for name in node.input]
            graph.node.insert(0, helper.make_node("Cast", [outer], [inner], to=TensorProto.FLOAT))
        else:
            rename(graph, outer, inner)
            graph.node.append(helper.make_node("Cast", [inner], [outer], to=TensorProto.FLOAT16))


def half_precision_logits(graph: onnx.GraphProto) -> None:
    rename(graph, "logits", "float_logits")
    graph.node.append(helper.make_node("Cast", ["float_logits"], ["logits"], to=TensorProto.FLOAT16))
    graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT16


def merged(graph: onnx.GraphProto) -> None:
    """As Optimum's merged exports: the branch with a past knows no causal mask, for it was traced with one token."""
    graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    node = next(node for node in graph.node if node.op_type == "LessOrEqual")
    causal, node.output[0] = node.output[0], "really_causal"
    graph.node.insert(
        list(graph.node).index(node) + 1, helper.make_node("Or", ["really_causal", "use_cache_branch"], [causal])
    )


def no_positions(graph: onnx.GraphProto) -> None:
    """Positions counted inside: the mask's sum along the tokens, the last of them."""
    graph.input.remove(next(value for value in graph.input if value.name == "position_ids"))
    constants = {"counted": [1], "back": [-1]}
    graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v), k) for k, v in constants.items())
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "along"))
    nodes = [
        helper.make_node("CumSum", ["attention_mask", "along"], ["sums"]),
        helper.make_node("Add", ["sums", "back"], ["all_positions"]),
        helper.make_node("Shape", ["input_ids"], ["size"], start=1),
        helper.make_node("Neg", ["size"], ["minus_size"]),
        helper.make_node("Shape", ["attention_mask"], ["total"], start=1),
        helper.make_node("Slice", ["all_positions", "minus_size", "total", "counted"], ["position_ids"]),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)


VARIANTS = [last_logits_only, num_logits_to_keep, half_precision_caches, half_precision_logits, merged, no_positions]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_variants_of_published_exports(variant: Any, usual_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(usual_folder, tmp_path / "export")
    edit(folder / "model.onnx", variant)
    drafter, plain = open_onnx(folder), open_onnx(usual_folder)
    for tokens in ([3], PROMPT, [*PROMPT[:4], 9, 10, 11], LONG, LONG[:100] + PROMPT):
        for params in (GREEDY, SamplingParams(seed=5)):
            assert ask(drafter, tokens, 5, params).tokens == ask(plain, tokens, 5, params).tokens

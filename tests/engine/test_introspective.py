# SPDX-License-Identifier: Apache-2.0
"""Introspective decoding gives the autoregressive answer, whatever is drafted."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import causal_loops
from reference.models import load_reference
from reference.philox import uniform_matrix

from tests.checkpoint_files import weights_of
from tests.checkpoints import EOS_ID, EOT_ID, MASK_ID, make_case, random_prompt, save_weights
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    finish,
    num_cached,
    record,
    running,
    start,
    uncached,
)
from tests.engine.schedules import ask_while_pages_are_lost
from tests.pages import NO_PAGES
from vllm.diffusion.config import served_model
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.core.random_streams import CATEGORICAL
from vllm.diffusion.engine.planning import demand_of
from vllm.diffusion.engine.scheduler.paging import Paging
from vllm.diffusion.engine.worker.step_graphs import buckets_of, fill
from vllm.diffusion.engine.worker.warm_up import warm_up
from vllm.diffusion.memory import RuleMemory
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel

STOP_IDS = (EOS_ID, EOT_ID)
ROW_BUDGET = 40
NUM_PAGES = 8  # one of them is reserved by upstream
# Factors of the logits. Of the first model nearly no draft holds, of the second one many hold, of
# the third one all.
FACTORS = {"sharp": 1.0, "flat": 0.05, "constant": 0.0}


def make_model(folder: Path, factor: float) -> Path:
    """Write a checkpoint whose logits are multiplied by a factor."""
    made = make_case(folder, "idlm")
    weights = weights_of(made)
    weights["lm_head.weight"] *= factor
    save_weights(made, weights)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("idlm")
    return {name: make_model(root / name, factor) for name, factor in FACTORS.items()}


# This test is the first one of the file, because ranks are only forked if no engine ran before.
def test_two_ranks(folders: dict[str, Path]) -> None:
    drawn = {"temperature": 1.0, "seed": 3}
    ratio = ask(30, acceptance="ratio", **drawn)
    with running(folders["flat"], tensor_parallel_size=2) as engine:
        for more in ({}, drawn):
            asks = [ask(30, "autoregressive", **more), *(ask(30, stride=n, **more) for n in (2, 8))]
            asks.append(ask(30, stride=4, draft_branches="all", **more))
            answers = engine.ask(*asks)
            assert ids(answers) == [answers[0].token_ids] * 4
            assert answers[3].report["cold_forwards"] == 1
        (of_two,) = engine.ask(ratio)
    with running(folders["flat"]) as engine:
        assert ids(engine.ask(ratio)) == [of_two.token_ids]


@pytest.fixture(scope="module", params=list(FACTORS))
def served(
    request: pytest.FixtureRequest, folders: dict[str, Path]
) -> Iterator[tuple[Engine, Path]]:
    folder = folders[request.param]
    with running(
        folder, max_num_batched_tokens=ROW_BUDGET, num_gpu_blocks_override=NUM_PAGES
    ) as engine:
        yield engine, folder


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> Iterator[Engine]:
    """Start an engine of the model of whose drafts many hold, with few rows and pages."""
    with running(
        folders["flat"],
        max_num_batched_tokens=ROW_BUDGET,
        num_gpu_blocks_override=NUM_PAGES,
        disable_log_stats=False,
    ) as engine:
        yield engine


def ids(answers: list[Response]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def decide(extra: dict[str, Any], model: ServedModel, prompt: list[int]) -> DiffusionParams:
    return decision.decide(fields.canonical(extra), model, prompt)


def one_by_one(one: Request) -> Request:
    """Return the same request, decoded one token at a time."""
    extra = {
        k: v for k, v in one.extra.items() if k not in ("stride", "acceptance", "draft_branches")
    }
    return Request(one.prompt, {**extra, "algorithm": "autoregressive"})


def ask(
    length: int, algorithm: str = "introspective", prompt_seed: int = 0, **more: Any
) -> Request:
    extra = {"gen_length": 33, "ignore_eos": True, "algorithm": algorithm, **more}
    return Request(random_prompt(length, prompt_seed), extra)


def causal(model: Any, sequence: list[int], num_causal: int) -> torch.Tensor:
    logits: torch.Tensor = model.causal_logits(torch.tensor([sequence]), num_causal)[0]
    return logits


def drawn(temperature: float, seed: int) -> Callable[[torch.Tensor, int], int]:
    """Return the choice of a token by Gumbel noise that depends on its position alone."""

    def choose(logits: torch.Tensor, place: int) -> int:
        p = torch.softmax(logits / temperature, dim=-1).double()
        u = uniform_matrix(seed, CATEGORICAL, 0, [place], len(logits))[0]
        return int((p.log() - torch.log(-torch.log(u))).argmax())

    return choose


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("stride", [2, 4, 7])
def test_the_published_loop(stride: int, temperature: float, served: tuple[Engine, Path]) -> None:
    """Answers and forward passes are those of the loop; answers are those of one at a time."""
    engine, folder = served
    model = load_reference(folder)
    asks, wanted = [], []
    for number, length in enumerate((20, 3, 70, 33)):
        fields = {"temperature": temperature, "seed": 11 + number, "ignore_eos": False}
        asks.append(ask(length, prompt_seed=number, stride=stride, **fields))
        choose = drawn(temperature, 11 + number) if temperature else causal_loops.most_likely
        lengths = {"gen_length": 33, "mask_id": MASK_ID, "stop_ids": STOP_IDS, "choose": choose}
        logits_of = partial(causal, model)
        wanted.append(
            causal_loops.introspective(logits_of, asks[-1].prompt, **lengths, stride=stride)
        )
        alone = causal_loops.autoregressive(logits_of, asks[-1].prompt, **lengths)
        assert wanted[-1].answer == alone.answer
    for run in (asks, [uncached(one) for one in asks]):
        answers = engine.ask(*run)
        assert ids(answers) == [decoded.answer for decoded in wanted]
        assert [a.num_forwards for a in answers] == [decoded.forwards for decoded in wanted]
    assert engine.is_idle()


@pytest.mark.parametrize("stride", [2, 4, 8])
def test_drafts_that_hold_save_forward_passes(stride: int, folders: dict[str, Path]) -> None:
    with running(folders["constant"]) as engine:
        for length in (1, 2, 3, 10, 33):
            one = ask(9, stride=stride, gen_length=length, temperature=1.0, seed=5)
            (answer,) = engine.ask(one)
            assert len(answer.token_ids) == length
            num_full = -(-(length - 2) // stride) if length > 2 else 0
            assert answer.num_forwards == min(length, 2) + num_full
            counts = [answer.report[n] for n in ("drafts_tried", "drafts_held", "cold_forwards")]
            assert counts == [num_full * (stride - 1)] * 2 + [int(length > 1)]


EDITS: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "few tokens": {"allowed_token_ids": [5, 6, 7]},
    "bias": {"logit_bias": {"7": 5.0, "8": 5.0}, "min_tokens": 9},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.5}
    | {"allowed_token_ids": [5, 6, 7, 8, 9]},
    "bad words": {"bad_words": ["ab", "ba", "aab", "bcc"]},
    "end": {"ignore_eos": False, "logit_bias": {str(EOS_ID): 3.0}, "min_tokens": 5},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS.keys())
def test_edits_count_the_drafts_before_a_row(
    edits: dict[str, Any], temperature: float, engine: Engine
) -> None:
    if "bad_words" in edits:
        encode = engine.llm.get_tokenizer().encode
        letters = sorted({token for word in ("a", "b", "c") for token in encode(word)})
        edits = {**edits, "allowed_token_ids": letters}
    asks, plain = [], []
    for seed in range(4):
        more = {"temperature": temperature, "seed": seed, "prompt_seed": seed, **edits}
        plain.append(ask(12 + seed, "autoregressive", **more))
        asks += [ask(12 + seed, stride=stride, **more) for stride in (2, 4, 16)]
    wanted = ids(engine.ask(*plain))
    assert ids(engine.ask(*asks)) == [one for one in wanted for _ in range(3)]


@pytest.fixture(scope="module")
def roomy(folders: dict[str, Path]) -> Iterator[Engine]:
    """Start an engine that has pages for branches."""
    with running(folders["flat"], num_gpu_blocks_override=800) as started:
        yield started


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
def test_branches_change_no_token(
    roomy: Engine, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wrong draft the next pass has drafts, too, so fewer passes are needed."""
    engine = roomy
    monkeypatch.setattr(engine.loop, "runs_ahead", ahead)
    for stride in (2, 4, 5):
        asks = [
            ask(
                5 + seed,
                prompt_seed=seed,
                seed=seed,
                stride=stride,
                temperature=(0, 0.7, 1.3)[seed % 3],
            )
            for seed in range(6)
        ]
        branched = [Request(a.prompt, {**a.extra, "draft_branches": "all"}) for a in asks]
        wanted = ids(engine.ask(*map(one_by_one, asks)))
        last = [engine.ask(one)[0] for one in asks]
        alone = [engine.ask(one)[0] for one in branched]
        assert ids(last) == ids(alone) == wanted
        assert sum(a.num_forwards or 0 for a in alone) < sum(a.num_forwards or 0 for a in last)
        assert [a.report["cold_forwards"] for a in alone] == [1] * len(asks)
        assert ids(engine.ask(*branched)) == wanted
        assert ids(engine.ask(*branched, *asks)) == 2 * wanted
        assert ids([engine.ask(uncached(one))[0] for one in branched[:2]]) == wanted[:2]
        traced = Request(branched[1].prompt, {**branched[1].extra, "return_trajectory": True})
        actual, plain = (a.report["trajectory"] for a in engine.ask(traced, one_by_one(traced)))
        torch.testing.assert_close(
            torch.tensor(actual["logprobs"]), torch.tensor(plain["logprobs"]), atol=1e-4, rtol=1e-4
        )
        assert max(actual["commit_steps"]) == actual["num_steps"] < plain["num_steps"]
    assert engine.is_idle()


@pytest.mark.parametrize("stride", [2, 4, 5])
def test_rows_and_passes_with_branches(
    stride: int, roomy: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass has stride x stride rows, and its drafts are those of the model at all its masks."""
    logits_of = partial(causal, load_reference(folders["flat"]))
    batches = record(monkeypatch, roomy.runner, "launch", lambda launched, _: launched.batch)
    for number, length in enumerate((20, 3, 70, 33)):
        more = {"prompt_seed": number, "temperature": 1.0, "seed": 5 + number, "stride": stride}
        one = ask(length, draft_branches="all", **more)
        wanted = causal_loops.introspective(
            logits_of,
            one.prompt,
            gen_length=33,
            mask_id=MASK_ID,
            stride=stride,
            has_branches=True,
            choose=drawn(1.0, 5 + number),
        )
        (answer,) = roomy.ask(one)
        assert answer.token_ids == wanted.answer
        assert answer.num_forwards == wanted.forwards
    rows = [batch.num_rows for batch in batches if len(batch.items) > 1]
    assert set(rows) == {stride**2}
    assert len(rows) > 20


def test_graphs_store_the_keys_of_branches(roomy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of a bucket name every slot of every row, and none of an earlier step."""
    buckets = buckets_of(roomy.runner.model.config)
    batches = record(monkeypatch, roomy.runner, "launch", lambda launched, _: launched.batch)
    asks = [ask(60 + n, prompt_seed=n, stride=4, draft_branches="all") for n in range(3)]
    roomy.ask(*asks, *map(one_by_one, asks))
    branched = max(batches, key=lambda batch: len(batch.items))
    assert len(branched.items) == 6 + 9
    bucket = buckets.find(branched)
    assert bucket is not None and bucket.is_cached
    inputs = bucket.inputs(NO_PAGES, 1000, has_blocks=True)
    plain = next(b for b in reversed(batches) if b.packing.copy_slots is None)
    for batch in (branched, plain):
        fill(inputs, batch)
        stored = {
            (int(position), int(slot))
            for slots in (inputs.slot_mapping, *inputs.copy_slots)
            for position, slot in zip(inputs.positions, slots, strict=True)
            if slot >= 0
        }
        needed = set()
        for item, window in zip(batch.items, batch.packing.windows, strict=True):
            first = window.first
            if item.window.context is not None:
                first = batch.packing.windows[batch.items.index(item.window.context)].first
            own = item.window.cache.slots[first : window.stop].tolist()
            needed |= set(zip(range(first, window.stop), own, strict=True))
        assert stored == needed


def test_branches_only_in_steps_of_few_rows(roomy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stride of 4, all of eight requests have branches, and never all of nine."""
    batches = record(monkeypatch, roomy.runner, "launch", lambda launched, _: launched.batch)
    for count, most in ((8, 128), (9, 127)):
        asks = [ask(5, prompt_seed=n, seed=n, temperature=1.0, stride=4) for n in range(count)]
        roomy.ask(*(Request(a.prompt, {**a.extra, "draft_branches": "all"}) for a in asks))
        rows = [
            batch.num_rows
            for batch in batches
            if len(batch.items) > len({item.req_id for item in batch.items}) == count
        ]
        assert max(rows, default=0) <= most
        assert count > 8 or max(rows) == most
        del batches[:]


@pytest.mark.parametrize("branches", ["last", "all"])
@pytest.mark.parametrize("num_before", [1, 2, 5, 6, 9])
def test_changed_weights_verify_the_drafts_of_others(
    num_before: int, branches: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """From the update on the answer is that of the new weights after the tokens before."""
    new = make_case(tmp_path / "new", "idlm")
    weights = {name: 0.8 * w.flip(0) for name, w in weights_of(new).items() if w.dim() == 2}
    weights = {**weights_of(folders["flat"]), **weights}
    weights["lm_head.weight"] *= 0.05
    save_weights(new, weights)
    fields = {"temperature": 0.8, "seed": 6, "stride": 4, "draft_branches": branches}
    one = ask(70, gen_length=40, return_trajectory=True, **fields)
    choose = drawn(0.8, 6)
    old_logits, new_logits = (
        partial(causal, load_reference(folder)) for folder in (folders["flat"], new)
    )
    with running(folders["flat"], num_gpu_blocks_override=600) as engine:
        start(engine, "a", one)
        while not any(c.num_steps == num_before for c in engine.runner.canvases.values()):
            engine.llm.llm_engine.step()
        engine.runner.model.load_weights(weights.items())
        (answer,) = finish(engine).values()
    trajectory = answer.report["trajectory"]
    (_, first_step), *_ = (pair for pair in trajectory["weight_steps"] if pair[0] == 1)
    num_old = sum(step < first_step for step in trajectory["commit_steps"])
    assert 0 < num_old < 40
    sequence = list(one.prompt)
    for place in range(40):
        logits_of = old_logits if place < num_old else new_logits
        sequence.append(choose(logits_of(sequence, len(sequence))[-1], place))
    assert answer.token_ids == sequence[70:]


def test_distributions_count_in_the_memory_of_requests(roomy: Engine) -> None:
    """8 bytes for each draft and token of the vocabulary, and more for the request that draws."""
    model = served_model(roomy.llm.llm_engine.vllm_config)

    def memory(stride: int, **more: Any) -> RuleMemory:
        extra = {"temperature": 1.0, "acceptance": "ratio", "stride": stride, **more}
        return demand_of(decide({"gen_length": 9, **extra}, model, [1]), 1).of_rule

    assert memory(4).kept == 8 * 3 * model.vocab_size
    assert memory(16).kept == 8 * 15 * model.vocab_size
    assert memory(16).drawing > memory(4).drawing > 0
    for more in ({"acceptance": "coupled"}, {"temperature": 0.0}):
        assert memory(4, **more) == RuleMemory()
    two = RuleMemory.of_all([memory(4), memory(16)])
    assert two == memory(4).kept + memory(16).kept + memory(16).drawing


def test_steps_are_planned_beside_the_distributions(
    roomy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = roomy.runner.account
    before, counted = account.kept_bytes, list[int]()
    record(monkeypatch, roomy.runner, "launch", lambda *_: counted.append(account.rule_bytes))
    plain = [ask(9, temperature=1.0, seed=n) for n in range(2)]
    drawn = [Request(a.prompt, {**a.extra, "acceptance": "ratio"}) for a in plain]
    roomy.ask(*plain)
    assert not any(counted)
    roomy.ask(*drawn)
    demands = [
        demand_of(decide(one.extra, served_model(roomy.llm.llm_engine.vllm_config), [1]), 1)
        for one in drawn
    ]
    assert max(counted) == RuleMemory.of_all(demand.of_rule for demand in demands)
    assert roomy.is_idle()
    assert account.rule_bytes == 0 and account.kept_bytes >= before


def test_the_warm_up_captures_all_graphs(roomy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of requests need no graph that a step of the warm-up has not captured."""
    buckets = buckets_of(roomy.runner.model.config)
    batches = record(monkeypatch, roomy.runner, "launch", lambda launched, _: launched.batch)
    model = served_model(roomy.llm.llm_engine.vllm_config)
    warm_up(roomy.runner, model, row_budget=300, shows_progress=False)
    captured = {buckets.find(batch) for batch in batches}
    del batches[:]
    for count in (1, 2, 5, 13, 40):
        asks = [
            ask(3 + 5 * n, prompt_seed=n, seed=n, stride=2 + n % 7, gen_length=6 + n % 9)
            for n in range(count)
        ]
        roomy.ask(*asks)
        roomy.ask(*map(one_by_one, asks))
        if count < 5:
            roomy.ask(*(Request(a.prompt, {**a.extra, "draft_branches": "all"}) for a in asks))
    needed = {buckets.find(batch) for batch in batches if batch.num_rows <= 300}
    assert len(needed) > 5
    assert needed - {None} <= captured


def test_many_seeds(engine: Engine) -> None:
    """Seeds, strides and temperatures in one batch; many drafts hold."""
    asks = [
        ask(5 + seed % 7, prompt_seed=seed % 5, seed=seed, temperature=(0.7, 1.0, 1.3)[seed % 3])
        for seed in range(40)
    ]
    strided = [
        Request(a.prompt, {**a.extra, "stride": (2, 4, 8)[seed % 3]}) for seed, a in enumerate(asks)
    ]
    answers = engine.ask(*strided)
    assert ids(answers) == ids(engine.ask(*map(one_by_one, asks)))
    assert sum(a.num_forwards or 0 for a in answers) < 0.8 * 33 * len(asks)


def test_ratio_in_a_batch(engine: Engine) -> None:
    """Answers of `ratio` depend on the seed alone, and more of its drafts hold."""
    asks = [
        ask(20, prompt_seed=seed % 3, seed=seed, temperature=1.0, stride=4, acceptance="ratio")
        for seed in range(12)
    ]
    answers = engine.ask(*asks)
    assert ids([engine.ask(uncached(one))[0] for one in asks[:3]]) == ids(answers[:3])
    coupled = engine.ask(*(Request(a.prompt, {**a.extra, "acceptance": "coupled"}) for a in asks))
    assert ids(engine.ask(*asks, asks[0]))[:12] == ids(answers)
    held, others = (sum(a.report["drafts_held"] for a in some) for some in (answers, coupled))
    assert held > others
    greedy = [Request(a.prompt, {**a.extra, "temperature": 0.0}) for a in asks[:3]]
    assert ids(engine.ask(*greedy)) == ids(engine.ask(*map(one_by_one, greedy)))


def test_log_probabilities_of_ratio(engine: Engine, folders: dict[str, Path]) -> None:
    """They are the model's after the tokens before, as with `coupled`."""
    fields = {"temperature": 1.0, "top_k": 50, "seed": 4, "return_trajectory": True}
    one = ask(20, acceptance="ratio", stride=4, **fields)
    (answer,) = engine.ask(one)
    sequence = [*one.prompt, *answer.token_ids]
    logits = causal(load_reference(folders["flat"]), sequence, len(sequence))
    logits[:, MASK_ID] = -torch.inf
    logprobs = torch.log_softmax(logits, dim=-1)
    wanted = [logprobs[20 + i - 1, token] for i, token in enumerate(answer.token_ids)]
    actual = torch.tensor(answer.report["trajectory"]["logprobs"])
    torch.testing.assert_close(actual, torch.stack(wanted), atol=1e-4, rtol=1e-4)


def test_log_probabilities_are_those_of_one_token_at_a_time(engine: Engine) -> None:
    fields = {"temperature": 1.0, "seed": 8, "return_trajectory": True, "return_entropy": True}
    one, other = engine.ask(ask(20, "autoregressive", **fields), ask(20, stride=4, **fields))
    wanted, actual = (answer.report["trajectory"] for answer in (one, other))
    assert actual["token_ids"] == wanted["token_ids"] == one.token_ids
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(
            torch.tensor(actual[name]), torch.tensor(wanted[name]), atol=1e-4, rtol=1e-4
        )
    assert actual["block_starts"] == wanted["block_starts"]
    assert actual["num_steps"] < wanted["num_steps"]
    assert other.report["drafts_held"] > 0 == one.report.get("drafts_held", 0)
    assert max(actual["commit_steps"]) == actual["num_steps"]
    assert sorted(actual["commit_steps"]) == actual["commit_steps"]


def test_pages_hold_no_draft(engine: Engine) -> None:
    """The pages of an answer serve a later prompt as pages of a prompt do."""
    fields = {"temperature": 1.0, "seed": 2, "gen_length": 130}
    assert engine.scheduler.reset_prefix_cache()
    (answer,) = engine.ask(ask(40, stride=6, **fields))
    follow = Request([*random_prompt(40), *answer.token_ids, 9], ask(1, gen_length=20).extra)
    assert num_cached(engine, follow) == 128
    wanted = engine.ask(uncached(follow))
    assert ids(engine.ask(follow)) == ids(wanted)


def test_who_loses_its_pages_goes_on_where_it_was(
    engine: Engine, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [ask(60, prompt_seed=n, stride=2 + n, temperature=1.0, seed=n) for n in range(6)]
    wanted = [engine.ask(one_by_one(one))[0].token_ids for one in asks]
    lost = record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)
    assert engine.scheduler.reset_prefix_cache()
    assert ids(engine.ask(*asks)) == wanted
    assert lost
    assert engine.is_idle()


def test_a_prompt_in_parts(engine: Engine) -> None:
    one = ask(110, stride=9, temperature=1.0, seed=4)
    (alone,) = engine.ask(one_by_one(one))
    answer = ask_while_pages_are_lost(engine, one, 7)
    assert answer.token_ids == alone.token_ids


def test_an_answer_with_a_format_is_written_one_token_at_a_time(engine: Engine) -> None:
    fields = {"structured_outputs": {"choice": ["Paris", "London"]}}
    (answer,) = engine.ask(Request(random_prompt(20), {"gen_length": 32, **fields}))
    assert answer.text in ("Paris", "London")


def test_a_likelihood_is_that_of_the_next_token(engine: Engine, folders: dict[str, Path]) -> None:
    prompt = random_prompt(30, 8)
    parameters = {"score": {"positions": [3, 29], "token_ids": [[1, 2], [5]]}}
    (answer,) = engine.ask(Request(prompt, parameters))
    logits = causal(load_reference(folders["flat"]), prompt, 30)
    actual, given = torch.log_softmax(logits, dim=-1), answer.report["scores"]["logprobs"]
    torch.testing.assert_close(torch.tensor(given[0]), actual[2, [1, 2]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(given[1]), actual[28, [5]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"stride": 32}, "stride: given 32; wanted at most 16"),
        ({"stride": 1}, "stride: given 1; wanted at least 2"),
        ({"acceptance": "greedy"}, "acceptance: given 'greedy'; wanted one of: coupled, ratio"),
        ({"algorithm": "low_confidence_dynamic"}, "supports autoregressive or introspective"),
        ({"algorithm": "autoregressive", "stride": 4}, "does not use it"),
        ({"allow_infill": True}, "allow_infill"),
    ],
)
def test_refusals(fields: dict[str, Any], line: str, engine: Engine) -> None:
    with pytest.raises((ValueError, InvalidParameterError), match=line):
        engine.ask(ask(5, **fields))


def test_the_stride_is_the_checkpoints(engine: Engine) -> None:
    (answer,) = engine.ask(ask(5, return_trajectory=True))
    assert answer.report["trajectory"]["parameters"]["stride"] == 4

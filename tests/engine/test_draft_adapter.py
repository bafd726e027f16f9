# SPDX-License-Identifier: Apache-2.0
"""An adapter for drafts changes which drafts hold, but no token of an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import causal_loops
from reference.models import load_reference

from tests.adapter_files import random_adapter, save_adapter
from tests.checkpoint_files import change_json, weights_of
from tests.checkpoints import MASK_ID, make_case, random_prompt, save_weights
from tests.engine.harness import (
    DETERMINISTIC,
    Engine,
    Request,
    Response,
    engine_config,
    record,
    running,
    uncached,
)
from vllm.diffusion.adapters import draft_adapter
from vllm.diffusion.adapters.draft_adapter import DraftAdapter
from vllm.diffusion.config import served_model
from vllm.diffusion.engine.scheduler.paging import Paging
from vllm.diffusion.engine.worker.step_graphs import buckets_of, fill
from vllm.diffusion.engine.worker.warm_up import warm_up

RANK, ALPHA = 4, 16
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(folder: Path) -> Path:
    """Write a checkpoint of whose drafts many hold."""
    made = make_case(folder, "idlm")
    weights = weights_of(made)
    weights["lm_head.weight"] *= 0.05
    save_weights(made, weights)
    return made


def add_adapter(
    folder: Path, target: Path, modules: Sequence[str] = MODULES, gain: float = 1.0
) -> dict[str, torch.Tensor]:
    """Write a random adapter and return what it adds to each matrix, by name."""
    names = tuple(modules)
    tensors = random_adapter(folder, lambda n: n.endswith(names), rank=RANK, gain=gain, seed=3)
    save_adapter(target, tensors, rank=RANK, alpha=ALPHA)
    prefix, added = "base_model.model.", {}
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        down, up = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
        added[f"{name.removeprefix(prefix)}.weight"] = ALPHA / RANK * up @ down
    return added


def ask(length: int, algorithm: str = "introspective", seed: int = 0, **more: Any) -> Request:
    extra = {"gen_length": 30, "ignore_eos": True, "algorithm": algorithm, "seed": seed, **more}
    return Request(random_prompt(length, seed), extra)


def ids(answers: list[Response]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def forwards(answers: list[Response]) -> list[int | None]:
    return [answer.num_forwards for answer in answers]


def one_by_one(asks: Sequence[Request]) -> list[Request]:
    fields = ("stride", "acceptance", "draft_branches")
    plain = [{k: v for k, v in one.extra.items() if k not in fields} for one in asks]
    return [
        Request(one.prompt, {**extra, "algorithm": "autoregressive"})
        for one, extra in zip(asks, plain, strict=True)
    ]


ASKS = [
    ask(length, seed=seed, stride=stride, temperature=temperature)
    for seed, (length, stride, temperature) in enumerate(
        ((20, 4, 0.0), (3, 2, 1.0), (70, 8, 0.7), (33, 4, 1.3), (9, 5, 0.0), (64, 3, 1.0))
    )
]


# This test is the first one of the file, because ranks are only forked if no engine ran before.
def test_two_ranks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "idlm")
    add_adapter(folder, folder / "adapter", gain=0.3)
    with running(folder, tensor_parallel_size=2) as engine:
        of_two, alone = engine.ask(*ASKS), engine.ask(*one_by_one(ASKS))
        assert ids(of_two) == ids(alone)
    with running(folder) as engine:
        assert forwards(engine.ask(*ASKS)) == forwards(of_two)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Response]]:
    """Return a checkpoint without an adapter, and the responses to `ASKS`."""
    folder = make_model(tmp_path_factory.mktemp("plain"))
    with running(folder) as engine:
        return folder, engine.ask(*ASKS)


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start an engine with an adapter of large random numbers, with few rows."""
    folder = make_model(tmp_path_factory.mktemp("wild"))
    add_adapter(folder, folder / "adapter", gain=100.0)
    with running(folder, max_num_batched_tokens=40, num_gpu_blocks_override=8) as engine:
        yield engine


def test_large_numbers_change_no_token(
    wild: Engine, plain: tuple[Path, list[Response]], runs_ahead: bool
) -> None:
    answers = wild.ask(*ASKS)
    assert ids(answers) == ids(plain[1])
    assert forwards(answers) != forwards(plain[1])
    assert ids(wild.ask(*map(uncached, ASKS))) == ids(plain[1])
    assert ids([wild.ask(one)[0] for one in ASKS]) == ids(plain[1])
    mixed = wild.ask(*ASKS, *one_by_one(ASKS), *ASKS)
    assert ids(mixed) == 3 * ids(plain[1])


def test_rows_that_draft_share_tiles(wild: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that draft need one tile, and the graph of a step has room for all tiles."""
    batches = record(monkeypatch, wild.runner, "launch", lambda launched, _: launched.batch)
    wild.ask(*[ask(5 + n, seed=n, stride=4, gen_length=8) for n in range(4)])
    buckets = replace(buckets_of(wild.runner.model.config), num_slots=1, has_drafts=True)
    shared = [batch for batch in batches if batch.num_whole == 0 and len(batch.items) > 1]
    assert any(batch.slots is not None for batch in shared)
    for batch in shared:
        if batch.slots is not None:
            drafting = [t for t in batch.targets if t.tail_start is not None]
            assert sum(run.stop - run.start for run in batch.slots.rows.runs) == 3 * len(drafting)
            tiles = batch.slots.rows.tiles(64)
            assert [slot for slot, *_ in tiles.table.tolist()] == [-1, 0]
        bucket = buckets.find(batch)
        assert bucket is not None
        inputs = bucket.inputs(None, 1000, has_blocks=True, marks_blocks=False)
        fill(inputs, batch)
        assert (inputs.tiles is None) == (batch.slots is None)


def test_the_warm_up_captures_graphs_with_the_adapter(
    plain: tuple[Path, list[Response]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / "idlm")
    add_adapter(folder, folder / "adapter")
    with running(folder, num_gpu_blocks_override=600) as engine:
        runner = engine.runner
        buckets = replace(buckets_of(runner.model.config), num_slots=1, has_drafts=True)
        batches = record(monkeypatch, runner, "launch", lambda launched, _: launched.batch)
        model = served_model(engine.llm.llm_engine.vllm_config)
        warm_up(runner, model, row_budget=200, shows_progress=False)
        captured = {buckets.find(batch) for batch in batches}
        del batches[:]
        for count in (1, 2, 5, 13):
            asks = [
                ask(3 + 5 * n, seed=n, stride=2 + n % 7, gen_length=6 + n % 9) for n in range(count)
            ]
            engine.ask(*asks)
            engine.ask(*map(uncached, asks[:3]))
        needed = {buckets.find(batch) for batch in batches if batch.num_rows <= 200}
    assert len([bucket for bucket in needed if bucket is not None and bucket.tiles]) > 3
    assert needed - {None} <= captured


def test_steps_with_drafts_are_planned_with_the_adapter(
    wild: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission and plans count the memory of the products with the adapter."""
    batches = record(monkeypatch, wild.runner, "launch", lambda launched, _: launched.batch)
    adapts = record(monkeypatch, Paging, "arrived", lambda _, paging, item: item.demand.adapts)
    one = ask(5, stride=4, gen_length=8)
    wild.ask(one)
    assert any(batch.shape.adapts for batch in batches)
    del batches[:]
    wild.ask(*one_by_one([one]))
    assert not any(batch.shape.adapts for batch in batches)
    assert adapts == [True, False]
    assert wild.runner.planner.shape.adapted is not None


def test_large_numbers_change_no_log_probability(
    wild: Engine, plain: tuple[Path, list[Response]]
) -> None:
    traced = [Request(a.prompt, {**a.extra, "return_trajectory": True}) for a in ASKS]
    alone = wild.ask(*one_by_one(traced))
    for answer, wanted in zip(wild.ask(*traced), alone, strict=True):
        actual, given = (a.report["trajectory"]["logprobs"] for a in (answer, wanted))
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(given), atol=1e-4, rtol=1e-4)


def test_slots_that_were_released_hold_the_adapter_again(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "idlm")
    add_adapter(folder, folder / "adapter", gain=0.3)
    with running(folder, enable_sleep_mode=True) as engine:
        before = engine.ask(*ASKS)
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
        after = engine.ask(*ASKS)
    assert ids(after) == ids(before)
    assert forwards(after) == forwards(before)


def test_ratio_draws_from_the_distribution_with_the_adapter(wild: Engine) -> None:
    """Drafts of another distribution rarely hold, and answers depend on the seed alone."""
    asks = [Request(a.prompt, {**a.extra, "acceptance": "ratio"}) for a in ASKS]
    answers = wild.ask(*asks)
    assert ids(answers) == ids([wild.ask(one)[0] for one in asks])
    assert [a for a, one in zip(ids(answers), ASKS, strict=True) if not one.extra["temperature"]]
    for place, one in enumerate(ASKS):
        if not one.extra["temperature"]:
            assert answers[place].token_ids == wild.ask(*one_by_one([one]))[0].token_ids


def drafted(plain: Any, adapted: Any, tokens: Sequence[int], _: int) -> torch.Tensor:
    """Return logits of which the rows of the masks at the end are computed with the adapter."""
    total, ids = len(tokens), torch.tensor([list(tokens)])
    first = next(i for i in range(total, 0, -1) if tokens[i - 1] != MASK_ID)
    sees = torch.ones(total, total, dtype=torch.bool).tril()
    logits, past = plain.forward_with_kv(ids[:, :first], range(first), None, sees[:first, :first])
    if first == total:
        return logits[0]
    masks = range(first, total)
    last = adapted.forward_with_kv(ids[:, first:], masks, past, sees[first:])[0]
    return torch.cat([logits[0], last[0]])


@pytest.mark.parametrize(
    "modules",
    [MODULES, ("q_proj", "v_proj"), ("o_proj",), ("gate_proj", "down_proj"), ("up_proj",)],
    ids=["all", "q v", "o", "gate down", "up"],
)
def test_masks_are_computed_with_the_adapter(modules: tuple[str, ...], tmp_path: Path) -> None:
    """Forward passes are those of a loop in which only masks have the adapter's weights."""
    folder = make_model(tmp_path / "idlm")
    added = add_adapter(folder, folder / "adapter", modules, gain=0.3)
    base = load_reference(folder)
    weights = weights_of(folder)
    assert set(added) <= set(weights)
    adapted = type(base)(base.config, {n: w + added.get(n, 0) for n, w in weights.items()})
    asks = [ask(length, seed=n, stride=4) for n, length in enumerate((20, 3, 66))]
    options: dict[str, Any] = {"gen_length": 30, "mask_id": MASK_ID, "stride": 4}
    options |= {"choose": causal_loops.most_likely, "stop_ids": ()}
    runs = [
        causal_loops.introspective(partial(drafted, base, adapted), one.prompt, **options)
        for one in asks
    ]
    with running(folder) as engine:
        for some in (asks, [uncached(one) for one in asks]):
            answers = engine.ask(*some)
            assert ids(answers) == [run.answer for run in runs]
            assert forwards(answers) == [run.forwards for run in runs]


def test_a_start_reads_the_sizes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "idlm")
    add_adapter(folder, folder / "adapter")
    reads = record(monkeypatch, draft_adapter, "sizes_of", lambda _, path: path)
    with running(folder):
        assert reads == [str(folder / "adapter")]


def test_a_plain_qwen3_with_an_adapter(plain: tuple[Path, list[Response]], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "qwen3")
    change_json(
        folder,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        **dict.fromkeys(("auto_map", "block_size", "fuse_cross_entropy", "use_regular_causal")),
        mask_token_id=None,
    )
    add_adapter(plain[0], tmp_path / "adapter", gain=100.0)
    settings = {**DETERMINISTIC["dllm"], "draft_adapter": str(tmp_path / "adapter")}
    overrides = {"mask_token_id": MASK_ID}
    with running(folder, additional_config={"dllm": settings}, hf_overrides=overrides) as engine:
        assert engine.runner.model.family.name == "idlm"
        answers = engine.ask(*ASKS)
        branched = [Request(a.prompt, {**a.extra, "draft_branches": "all"}) for a in ASKS[:3]]
        assert ids([engine.ask(one)[0] for one in branched]) == ids(answers[:3])
    assert ids(answers) == ids(plain[1])
    assert forwards(answers) != forwards(plain[1])


def test_requests_may_have_adapters_of_their_own(
    plain: tuple[Path, list[Response]], tmp_path: Path
) -> None:
    """Rows that draft use the adapter for drafts, whatever adapter their request has."""
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    folder = make_model(tmp_path / "idlm")
    add_adapter(folder, folder / "adapter", gain=100.0)
    own = tmp_path / "own"
    add_adapter(folder, own, ("q_proj", "down_proj"), gain=0.2)
    requests = [None, LoRARequest("own", 1, str(own))] * 3
    answers = {}
    for name in ("introspective", "autoregressive"):
        fields = {"gen_length": 20, "ignore_eos": True, "algorithm": name}
        with running(folder, enable_lora=True, max_lora_rank=8) as engine:
            outputs = engine.llm.generate(
                [{"prompt_token_ids": random_prompt(20, n)} for n in range(6)],
                [SamplingParams(extra_args=fields, max_tokens=20, temperature=0) for _ in range(6)],
                lora_request=requests,
                use_tqdm=False,
            )
        answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers["introspective"] == answers["autoregressive"]
    assert len({tuple(answer) for answer in answers["autoregressive"]}) == 6


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("head", "draft_adapter: given target_modules .*lm_head.*; wanted some of q_proj, k_proj"),
        ("nothing", "draft_adapter: given .*lora_path: given .*; wanted a folder with"),
        ("sdar", "draft_adapter: given .*; wanted none: a model of family sdar makes no drafts"),
        ("shape", "draft_adapter: .*lora_A, lora_B: given"),
    ],
)
def test_refusals(case: str, line: str, tmp_path: Path) -> None:
    folder = make_case(tmp_path / "model", "sdar" if case == "sdar" else "idlm")
    adapter = tmp_path / "adapter"
    if case != "nothing":
        modules = ("q_proj", "lm_head") if case == "head" else ("q_proj",)
        tensors = random_adapter(folder, lambda name: name.endswith(modules), rank=RANK)
        if case == "shape":
            tensors = {name: tensor[:, :3].contiguous() for name, tensor in tensors.items()}
        save_adapter(adapter, tensors, rank=RANK)
    with pytest.raises(ValueError, match=line):  # before the engine's process starts
        engine_config(folder, additional_config={"dllm": {"draft_adapter": str(adapter)}})


def test_a_wrong_shape_in_the_folder_of_a_checkpoint(tmp_path: Path) -> None:
    folder = make_case(tmp_path / "model", "idlm")
    tensors = random_adapter(folder, lambda name: name.endswith("q_proj"), rank=RANK)
    short = {name: tensor[:, :3].contiguous() for name, tensor in tensors.items()}
    save_adapter(folder / "adapter", short, rank=RANK)
    with pytest.raises(ValueError, match=r"draft_adapter: .*lora_A, lora_B: given"):
        engine_config(folder)


def test_a_checkpoint_without_an_adapter_has_no_slots(plain: tuple[Path, list[Response]]) -> None:
    assert not served_model(engine_config(plain[0])).has_draft_adapter
    with pytest.raises(ValueError, match=r"unknown parameter; did you mean draft_adapter\?"):
        engine_config(plain[0], additional_config={"dllm": {"draft_adaptr": "x"}})


def test_the_folder_of_a_checkpoint_on_the_hub_is_downloaded(
    plain: tuple[Path, list[Response]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, although several parts of a server ask for it."""
    add_adapter(plain[0], tmp_path / "snapshot" / "adapter", gain=1.0)
    calls = list[tuple[str, str | None, str]]()

    def download(name: str, *, revision: str | None, allow_patterns: str) -> str:
        calls.append((name, revision, allow_patterns))
        if name == "some/private":
            raise OSError("not found")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(draft_adapter, "snapshot_download", download)
    for _ in range(2):
        found = draft_adapter.draft_adapter_in("some/model", "adapter", "v1")
        assert found == DraftAdapter(str(tmp_path / "snapshot" / "adapter"))
    assert calls == [("some/model", "v1", "adapter/*")]
    assert draft_adapter.draft_adapter_in("some/model", "other", "v1") is None
    assert draft_adapter.draft_adapter_in("some/private", "adapter", None) is None

# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded, replaced, removed and evicted while requests run."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_files import lora_request, merge, random_adapter, save_adapter
from tests.checkpoints import CASES, make_case, random_prompt
from tests.engine.harness import (
    BLOCKS,
    Engine,
    Request,
    Response,
    finish,
    running,
    sampling_params,
    step,
    to_answer,
)
from vllm.diffusion.core.errors import AdapterError

SHORT: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8, "seed": 7}


def ask(engine: Engine, one: Request, adapter: Any = None) -> Response:
    """Run one request."""
    (output,) = outputs(engine, [one], adapter)
    return to_answer(output)


def outputs(engine: Engine, asks: list[Request], adapter: Any = None) -> list[Any]:
    answers: list[Any] = engine.llm.generate(
        [{"prompt_token_ids": list(one.prompt)} for one in asks],
        [sampling_params(one) for one in asks],
        use_tqdm=False,
        lora_request=adapter,
    )
    return answers


def begin(engine: Engine, name: str, one: Request, adapter: Any = None) -> None:
    """Queue a request."""
    prompt: Any = {"prompt_token_ids": one.prompt}
    engine.llm.llm_engine.add_request(name, prompt, sampling_params(one), lora_request=adapter)
    if engine.scheduler.last_usage is None:  # the first step only reports the memory
        engine.llm.llm_engine.step()


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("gqa")


@pytest.fixture(scope="module")
def paths(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Write four adapters of the same matrices."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(root / f"a{n}", random_adapter(folder, seed=n, gain=0.5)) for n in range(4)
    ]


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with running(folder, enable_lora=True, max_loras=2, max_cpu_loras=2) as engine:
        yield engine


def test_upstreams_calls(engine: Engine, paths: list[Path]) -> None:
    calls = engine.llm.llm_engine
    assert calls.list_loras() == set()
    assert calls.add_lora(lora_request("a", 1, paths[0]))
    assert calls.add_lora(lora_request("a", 1, paths[0]))  # it is known
    assert calls.add_lora(lora_request("b", 2, paths[1]))
    assert calls.list_loras() == {1, 2}
    assert calls.pin_lora(1)
    assert not calls.pin_lora(9)
    assert calls.add_lora(lora_request("c", 3, paths[2]))
    assert calls.list_loras() == {1, 3}  # the first is pinned
    assert calls.remove_lora(3)
    assert not calls.remove_lora(3)
    assert calls.list_loras() == {1}


def test_a_number_of_another_adapter(engine: Engine, paths: list[Path]) -> None:
    one, line = Request(random_prompt(5), SHORT), "given 1 for 'b'; wanted another number: it is"
    ask(engine, one, lora_request("a", 1, paths[0]))
    with pytest.raises(AdapterError, match=line):
        engine.llm.llm_engine.add_lora(lora_request("b", 1, paths[1]))
    with pytest.raises(ValueError, match=line):
        ask(engine, one, lora_request("b", 1, paths[1]))
    engine.llm.llm_engine.remove_lora(1)
    wanted = ask(engine, one, lora_request("b", 1, paths[1])).token_ids
    # A trainer that loads each adapter itself may give its number to the next one.
    engine.llm.llm_engine.remove_lora(1)
    assert engine.llm.llm_engine.add_lora(lora_request("c", 1, paths[2]))
    other = ask(engine, one, lora_request("c", 1, paths[2])).token_ids
    assert other != wanted
    with pytest.raises(ValueError, match="given 1 for 'b'; wanted another number: it is"):
        ask(engine, one, lora_request("b", 1, paths[1]))
    assert ask(engine, one, lora_request("c", 1, paths[2])).token_ids == other


def test_an_evicted_adapter_is_read_again(
    engine: Engine, paths: list[Path], tmp_path: Path
) -> None:
    one = Request(random_prompt(20), SHORT)
    places = [Path(shutil.copytree(path, tmp_path / path.name)) for path in paths]
    adapters = [lora_request(f"a{n}", n + 1, path) for n, path in enumerate(places)]
    answers = [ask(engine, one, adapter).token_ids for adapter in adapters]
    assert [ask(engine, one, adapter).token_ids for adapter in adapters] == answers
    assert len(engine.llm.llm_engine.list_loras()) == 2
    shutil.rmtree(places[0])
    with running_error(engine, one, adapters[0]) as error:
        assert "lora_path: given" in error
    save_adapter(places[1], random_adapter(engine_folder(engine), seed=9))
    with running_error(engine, one, adapters[1]) as error:
        assert "changed since they were loaded" in error
    assert ask(engine, one, adapters[3]).token_ids == answers[3]
    assert engine.is_idle()


def engine_folder(engine: Engine) -> Path:
    return Path(engine.llm.llm_engine.vllm_config.model_config.model)


class running_error:
    """Context with the error that ends a request."""

    def __init__(self, engine: Engine, one: Request, adapter: Any) -> None:
        self._call = engine, one, adapter

    def __enter__(self) -> str:
        answer = ask(*self._call)
        assert answer.finish_reason == "error"
        return str(answer.report["error"])

    def __exit__(self, *_: object) -> None:
        pass


def test_a_folder_that_is_wrong_is_refused_before_anything_runs(
    engine: Engine, paths: list[Path]
) -> None:
    one = Request(random_prompt(5), SHORT)
    with pytest.raises(ValueError, match="lora_path: given '/nowhere'; wanted a folder"):
        ask(engine, one, lora_request("a", 1, "/nowhere"))
    with pytest.raises(AdapterError, match="lora_path: given '/nowhere'; wanted a folder"):
        engine.llm.llm_engine.add_lora(lora_request("a", 1, "/nowhere"))
    assert engine.llm.llm_engine.list_loras() == set()
    assert engine.is_idle()


def test_an_engine_without_adapters_refuses_them(folder: Path, paths: list[Path]) -> None:
    with running(folder) as engine:
        line = "lora_request: given 'a'; wanted none: start with enable_lora"
        with pytest.raises(ValueError, match=line):
            ask(engine, Request(random_prompt(5), SHORT), lora_request("a", 1, paths[0]))


def test_a_removed_adapter_stays_for_its_requests(engine: Engine, paths: list[Path]) -> None:
    one, a, b = Request(random_prompt(20), SHORT), *adapters_of(paths)
    wanted = [ask(engine, one, a).token_ids, ask(engine, one, b).token_ids]
    begin(engine, "runs", one, a)
    step(engine)
    begin(engine, "waits", one, b)  # the scheduler has not seen it yet
    assert engine.llm.llm_engine.remove_lora(1)
    assert engine.llm.llm_engine.remove_lora(2)
    assert engine.llm.llm_engine.list_loras() == set()
    answers = finish(engine)
    assert [answers["runs"].token_ids, answers["waits"].token_ids] == wanted
    assert engine.is_idle()
    assert engine.runner.adapters.all == []  # their memory is free


def adapters_of(paths: list[Path]) -> tuple[Any, Any]:
    return lora_request("a", 1, paths[0]), lora_request("b", 2, paths[1])


def test_every_adapter_in_use_leaves_no_room(engine: Engine, paths: list[Path]) -> None:
    one = Request(random_prompt(20), SHORT)
    for name, adapter in zip("ab", adapters_of(paths), strict=True):
        begin(engine, name, one, adapter)
    step(engine)
    with pytest.raises(AdapterError, match="max_cpu_loras: given 2, all in use"):
        engine.llm.llm_engine.add_lora(lora_request("c", 3, paths[2]))
    finish(engine)
    assert engine.llm.llm_engine.add_lora(lora_request("c", 3, paths[2]))


def test_two_hundred_adapters_leave_nothing_behind(engine: Engine, paths: list[Path]) -> None:
    one = Request(random_prompt(5), {**SHORT, "gen_length": 8, "steps": 1})
    for number in range(1, 201):
        ask(engine, one, lora_request(f"p{number}", number, paths[number % 4]))
        assert engine.llm.llm_engine.remove_lora(number)
    assert engine.runner.adapters.all == []
    assert engine.is_idle()


CACHES: dict[str, dict[str, Any]] = {
    "none": BLOCKS,
    "prefix": {**BLOCKS, "cache": "prefix"},
    "dual": {**BLOCKS, "cache": "dual"},
    "frozen": {**BLOCKS, "cache": "frozen"},
    "delayed": {"gen_length": 32, "block_length": 8, "algorithm": "multi_block"}
    | {"cache": "delayed"},
    "guided": {**BLOCKS, "cfg_scale": 0.7, "cache": "frozen"},
    "drafts": {**BLOCKS, "cache": "dual", "num_speculative_states": 2},
}


@pytest.mark.parametrize("is_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("parameters", CACHES.values(), ids=CACHES.keys())
def test_a_replaced_adapter_acts_on_its_requests_alone(
    is_ahead: bool,
    parameters: dict[str, Any],
    engine: Engine,
    folder: Path,
    paths: list[Path],
    tmp_path: Path,
) -> None:
    """The requests begin again without cached keys; the requests of others go on."""
    engine.loop.runs_ahead = is_ahead
    prompt, other = random_prompt(20), random_prompt(9, seed=1)
    place = Path(shutil.copytree(paths[0], tmp_path / "a"))
    a, b = lora_request("a", 1, place), lora_request("b", 2, paths[1])
    bystanders = {"base": (None, other), "b": (b, prompt)}
    alone = {
        name: ask(engine, Request(tokens, parameters), adapter)
        for name, (adapter, tokens) in bystanders.items()
    }
    merged = {n: merge(folder, paths[n], tmp_path / f"merged {n}") for n in (0, 2)}
    total = ask(engine, Request(prompt, parameters), a).num_forwards or 0
    assert total > 2
    for num_before in sorted({1, total // 2, total - 1}):
        save_adapter(place, random_adapter(folder, seed=0, gain=0.5))
        engine.llm.llm_engine.add_lora(lora_request("a", 1, place, load_inplace=True))
        begin(engine, "a", Request(prompt, parameters), a)
        for name, (adapter, tokens) in bystanders.items():
            begin(engine, name, Request(tokens, parameters), adapter)
        answers = step_until(engine, num_before)
        save_adapter(place, random_adapter(folder, seed=2, gain=0.5))
        assert engine.llm.llm_engine.add_lora(lora_request("a", 1, place, load_inplace=True))
        answers |= finish(engine)
        for name, wanted in alone.items():
            answer = answers[name]
            assert (answer.token_ids, answer.num_forwards) == (
                wanted.token_ids,
                wanted.num_forwards,
            )
        simulated = after_a_change(
            merged, Request(prompt, parameters), num_before, is_ahead=is_ahead
        )
        assert answers["a"].token_ids == simulated
        assert engine.is_idle()


def test_a_load_is_undone(engine: Engine, paths: list[Path], tmp_path: Path) -> None:
    """The calls that follow where another replica refuses an adapter."""
    one, calls = Request(random_prompt(20), SHORT), engine.llm.llm_engine
    place = Path(shutil.copytree(paths[0], tmp_path / "a"))
    a, b = lora_request("a", 1, place), lora_request("b", 2, paths[1])
    wanted = ask(engine, one, a).token_ids
    calls.add_lora(b)
    engine.llm.collective_rpc("undo_load", args=(2,))
    assert calls.list_loras() == {1}
    engine.llm.collective_rpc("undo_load", args=(1,))  # another load came after it
    save_adapter(place, random_adapter(engine_folder(engine), seed=9))
    begin(engine, "a", one, a)
    step_until(engine, 3)
    calls.add_lora(lora_request("a", 1, place, load_inplace=True))
    engine.llm.collective_rpc("undo_load", args=(1,))
    finish(engine)
    assert ask(engine, one, a).token_ids == wanted
    for number in (3, 4):
        calls.add_lora(lora_request(f"{number}", number, paths[number - 1]))
    assert calls.list_loras() == {3, 4}
    calls.add_lora(lora_request("a", 1, place, load_inplace=True))
    engine.llm.collective_rpc("undo_load", args=(1,))
    with running_error(engine, one, a) as error:  # its files are those of the refused load
        assert "changed since they were loaded" in error
    assert engine.is_idle()


def request_id(engine: Engine, name: str = "a") -> str:
    """Return the engine's id of a request that was queued by this name."""
    return next(iter(engine.llm.llm_engine.output_processor.external_req_ids[name]), "")


def step_until(engine: Engine, num_forwards: int) -> dict[str, Response]:
    """Step until request "a", which must not end, has taken some forward passes; return answers."""
    answers = dict[str, Response]()
    while engine.runner.canvases.get(request_id(engine)) is None:
        answers |= step(engine)
    while engine.runner.canvases[request_id(engine)].num_forwards < num_forwards:
        answers |= step(engine)
    assert "a" not in answers
    return answers


def after_a_change(
    merged: dict[int, Path], one: Request, num_before: int, *, is_ahead: bool = False
) -> list[int]:
    """Return the answer of a model whose weights change after some forward passes."""
    with running(merged[0], weight_transfer_config={"backend": "disk"}) as engine:
        engine.loop.runs_ahead = is_ahead
        begin(engine, "a", one)
        answers = step_until(engine, num_before)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(merged[2])})
        return (answers | finish(engine))["a"].token_ids


@pytest.mark.parametrize("name", ["sdar", "llada2", "fast_dllm"])
def test_pages_are_those_of_one_adapter(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Prefixes are shared under the same adapter only, and not after it was replaced."""
    folder, parameters = checkpoint(name), {"gen_length": 16, "block_length": 8, "seed": 7}
    tensors = [random_adapter(folder, seed=n, gain=0.5) for n in range(3)]
    places = [save_adapter(tmp_path / f"a{n}", t) for n, t in enumerate(tensors)]
    one = Request(random_prompt(150), parameters)
    wanted = [
        ask_merged(merge(folder, place, tmp_path / f"merged {place.name}"), one) for place in places
    ]
    with running(folder, enable_lora=True, max_loras=2) as engine:
        plain = ask(engine, one).token_ids
        a, b = lora_request("a", 1, places[0]), lora_request("b", 2, places[1])

        def cached(adapter: Any, tokens: list[int]) -> int:
            (output,) = outputs(engine, [one], adapter)
            assert to_answer(output).token_ids == tokens
            return int(output.num_cached_tokens)

        assert cached(None, plain) >= 64
        assert cached(a, wanted[0]) == 0
        assert cached(b, wanted[1]) == 0
        assert min(cached(a, wanted[0]), cached(b, wanted[1]), cached(None, plain)) >= 64
        together = [to_answer(o).token_ids for o in outputs(engine, [one] * 3, [None, a, b])]
        assert together == [plain, wanted[0], wanted[1]]
        save_adapter(places[0], tensors[2])
        assert engine.llm.llm_engine.add_lora(lora_request("a", 1, places[0], load_inplace=True))
        assert cached(a, wanted[2]) == 0
        assert min(cached(a, wanted[2]), cached(b, wanted[1]), cached(None, plain)) >= 64
        engine.llm.llm_engine.remove_lora(1)
        save_adapter(places[0], tensors[0])
        assert cached(a, wanted[0]) == 0
        assert engine.is_idle()


def ask_merged(folder: Path, one: Request) -> list[int]:
    with running(folder) as engine:
        return ask(engine, one).token_ids


@pytest.mark.parametrize("name", ["sdar", "nemotron"])
def test_paged_requests_begin_again_with_a_replaced_adapter(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint(name)
    parameters = {"gen_length": 32, "block_length": 8, "seed": 7, "ignore_eos": True}
    one, other = Request(random_prompt(70), parameters), Request(random_prompt(80), parameters)
    tensors = [random_adapter(folder, seed=n, gain=0.5) for n in range(2)]
    place = save_adapter(tmp_path / "a", tensors[0])
    merged = {0: merge(folder, place, tmp_path / "merged 0")}
    merged[2] = merge(folder, save_adapter(tmp_path / "b", tensors[1]), tmp_path / "merged 2")
    simulated = after_a_change(merged, one, num_before=5)
    with running(folder, enable_lora=True) as engine:
        alone = ask(engine, other)
        begin(engine, "a", one, lora_request("a", 1, place))
        begin(engine, "base", other)
        while engine.runner.canvases.get(request_id(engine)) is None:
            step(engine)
        while engine.runner.canvases[request_id(engine)].num_forwards < 5:
            step(engine)
        save_adapter(place, tensors[1])
        assert engine.llm.llm_engine.add_lora(lora_request("a", 1, place, load_inplace=True))
        answers = finish(engine)
        assert answers["a"].token_ids == simulated
        assert answers["base"].token_ids == alone.token_ids
        assert engine.is_idle()


def test_a_refused_replacement_changes_nothing(
    engine: Engine, folder: Path, paths: list[Path], tmp_path: Path
) -> None:
    one = Request(random_prompt(20), {**BLOCKS, "cache": "dual"})
    place = Path(shutil.copytree(paths[0], tmp_path / "a"))
    a = lora_request("a", 1, place)
    wanted = ask(engine, one, a)
    begin(engine, "a", one, a)
    step(engine), step(engine)
    save_adapter(place, random_adapter(folder, seed=2, rank=4), rank=8)
    with pytest.raises(AdapterError, match="lora_A, lora_B: given"):
        engine.llm.llm_engine.add_lora(lora_request("a", 1, place, load_inplace=True))
    answer = finish(engine)["a"]
    assert (answer.token_ids, answer.num_forwards) == (wanted.token_ids, wanted.num_forwards)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_come_and_go_while_the_engine_sleeps(
    level: int, folder: Path, paths: list[Path]
) -> None:
    one, (a, b) = Request(random_prompt(20), {**BLOCKS, "cache": "dual"}), adapters_of(paths)
    with running(folder, enable_lora=True, max_loras=2, enable_sleep_mode=True) as engine:
        wanted = [ask(engine, one, adapter).token_ids for adapter in (a, b)]
        assert engine.llm.llm_engine.remove_lora(2)
        begin(engine, "a", one, a)
        step(engine)
        engine.llm.sleep(level=level, mode="keep")
        assert engine.llm.llm_engine.add_lora(b)
        engine.llm.wake_up()
        if level == 2:
            engine.llm.collective_rpc("reload_weights")
        finish(engine)
        assert [ask(engine, one, adapter).token_ids for adapter in (a, b)] == wanted
        assert engine.is_idle()


def test_an_update_of_the_weights_keeps_adapters(
    folder: Path, paths: list[Path], tmp_path: Path
) -> None:
    other = make_case(tmp_path / "other", "gqa", {"gqa": replace(CASES["gqa"], seed=5)})
    one, (a, _) = Request(random_prompt(20), SHORT), adapters_of(paths)
    with running(merge(other, paths[0], tmp_path / "merged")) as engine:
        wanted = ask(engine, one).token_ids
    with running(folder, enable_lora=True, weight_transfer_config={"backend": "disk"}) as engine:
        before = ask(engine, one, a).token_ids
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        assert ask(engine, one, a).token_ids == wanted != before


def test_a_trajectory_shows_the_replacement(
    engine: Engine, paths: list[Path], tmp_path: Path
) -> None:
    place = Path(shutil.copytree(paths[0], tmp_path / "a"))
    one = Request(random_prompt(20), {**BLOCKS, "return_trajectory": True})
    begin(engine, "a", one, lora_request("a", 1, place))
    begin(engine, "base", one)
    while engine.runner.canvases.get(request_id(engine)) is None:
        step(engine)
    while engine.runner.canvases[request_id(engine)].num_steps < 6:
        step(engine)
    engine.llm.llm_engine.add_lora(lora_request("a", 1, paths[1], load_inplace=True))
    answers = finish(engine)
    changed, plain = (answers[name].report["trajectory"] for name in ("a", "base"))
    assert (changed["adapter"], changed["adapter_steps"]) == ("a", [[0, 1], [1, 7]])
    assert changed["weight_version"] is None
    assert (plain["adapter"], plain["adapter_steps"]) == (None, [])
    assert plain["weight_version"] == "default"


def test_tensors_of_a_trainer(engine: Engine, folder: Path, paths: list[Path]) -> None:
    """A trainer sends tensors instead of a folder, under the same number each time."""
    from vllm.lora.request import LoRARequest

    class Tensors(LoRARequest):
        peft_config: dict[str, Any] | None = None
        lora_tensors: dict[str, Any] | None = None

    one = Request(random_prompt(20), SHORT)
    wanted = [ask(engine, one, lora_request(f"p{n}", n + 5, paths[n])).token_ids for n in (0, 1)]
    worker = engine.core.model_executor.driver_worker.worker
    named = lora_request("123", 123, "simon_lora_path")
    for seed in (0, 1):
        tensors = random_adapter(folder, seed=seed, gain=0.5)
        worker.remove_lora(123)
        worker.add_lora(
            Tensors(
                "123",
                123,
                "simon_lora_path",
                peft_config={"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"},
                lora_tensors=tensors,
            )
        )
        for tensor in tensors.values():
            tensor.zero_()  # the worker has its own copy
        assert 123 in worker.list_loras()
        assert ask(engine, one, named).token_ids == wanted[seed]
    for number in (1, 2):
        ask(engine, one, lora_request(f"x{number}", number, paths[number]))
    with running_error(engine, one, named) as error:
        assert "its tensors were dropped to make room" in error


def test_names_of_adapters_reach_both_loggers(folder: Path, paths: list[Path]) -> None:
    with running(folder, enable_lora=True, max_loras=2, disable_log_stats=False) as engine:
        a, _ = adapters_of(paths)
        begin(engine, "a", Request(random_prompt(20), SHORT), a)
        while not engine.llm.llm_engine.step():
            pass  # the first tokens announce that the request runs
        step(engine)
        engine.llm.llm_engine.do_log_stats()
        samples = [m for m in engine.llm.get_metrics() if m.name == "vllm:lora_requests_info"]
        labels = [sample.labels for sample in samples]
        assert "a" in {label["running_lora_adapters"] for label in labels}
        assert {label["max_lora"] for label in labels} == {"2"}
        assert "dllm" not in str(labels)
        finish(engine)

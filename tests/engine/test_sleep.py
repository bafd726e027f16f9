# SPDX-License-Identifier: Apache-2.0
"""Sleep mode: memory is released to a trainer while requests wait."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapter_files import lora_request, random_adapter, save_adapter
from tests.checkpoints import random_prompt
from tests.engine.harness import (
    BLOCKS,
    DETERMINISTIC,
    Engine,
    Request,
    finish,
    running,
    sampling_params,
    start,
    to_answer,
)

GRID = {"gen_length": 24, "block_length": 8}


def begun(engine: Engine, ask: Request, num_steps: int) -> Any:
    """Start a request and return its canvas after `num_steps` steps."""
    start(engine, "a", ask)
    while True:
        engine.llm.llm_engine.step()
        for canvas in engine.runner.canvases.values():
            if canvas.num_steps >= num_steps:
                return canvas


@pytest.mark.parametrize(
    ("family", "parameters"),
    [("mha", {**BLOCKS, "cache": cache}) for cache in ("none", "dual", "frozen")]
    + [("sdar", GRID), ("mha", {**BLOCKS, "cache": "dual", "num_speculative_states": 3})],
    ids=["none", "dual", "frozen", "exact", "guesses"],
)
def test_a_request_sleeps_and_goes_on(
    family: str, parameters: dict[str, Any], checkpoint: Callable[[str], Path]
) -> None:
    """The engine holds no cache while it sleeps, and the answer does not change."""
    ask = Request(random_prompt(70), {**parameters, "ignore_eos": True, "return_trajectory": True})
    with running(checkpoint(family), enable_sleep_mode=True) as engine:
        (wanted,) = engine.ask(ask)
        canvas = begun(engine, ask, 5)
        steps = canvas.num_steps
        engine.llm.sleep(level=1, mode="keep")
        assert engine.runner.caches.reserved_bytes == 0 and engine.runner.pool.num_bytes == 0
        engine.llm.llm_engine.step()
        assert canvas.num_steps == steps
        engine.llm.wake_up(["weights"])
        engine.llm.llm_engine.step()
        assert canvas.num_steps == steps
        engine.llm.wake_up(["kv_cache"])
        answer = finish(engine)["a"]
        assert engine.is_idle()
        assert engine.ask(ask)[0].token_ids == wanted.token_ids
    if parameters.get("cache") in ("none", None):
        assert answer.token_ids == wanted.token_ids
    assert answer.report["trajectory"]["weight_steps"] == [[0, 1]]


def disk_updates(root: Path) -> dict[str, Any]:
    """Return the settings of an engine that takes updates from folders below `root`."""
    from vllm.config import WeightTransferConfig

    return {
        "weight_transfer_config": WeightTransferConfig(backend="disk"),
        "additional_config": {"dllm": {**DETERMINISTIC["dllm"], "weight_update_root": str(root)}},
    }


def test_discarded_weights_want_an_update(checkpoint: Callable[[str], Path]) -> None:
    ask = Request(random_prompt(9), {**BLOCKS, "ignore_eos": True})
    with running(checkpoint("moe"), quantization="fp8", enable_sleep_mode=True) as engine:
        (wanted,) = engine.ask(ask)
        canvas = begun(engine, ask, 2)
        engine.llm.sleep(level=2, mode="keep")
        assert not torch.isfinite(engine.runner.model.model.norm.weight).any()
        engine.llm.wake_up()
        for _ in range(3):
            engine.llm.llm_engine.step()
        assert canvas.num_steps == 2
        engine.llm.collective_rpc("reload_weights")
        assert finish(engine)["a"].token_ids == wanted.token_ids


def test_weights_that_sleep_are_neither_read_nor_written(checkpoint: Callable[[str], Path]) -> None:
    """On a GPU their addresses have no memory, so that a read would end the engine."""
    folder = checkpoint("mha")
    ask = Request(random_prompt(9), {**BLOCKS, "ignore_eos": True})
    with running(folder, enable_sleep_mode=True, **disk_updates(folder.parent)) as engine:
        llm = engine.llm
        (wanted,) = engine.ask(ask)
        for level in (1, 2):
            llm.sleep(level=level, mode="keep")
            for method in ("reload_weights", "reset_weights", "compute_weight_checksums"):
                with pytest.raises(RuntimeError, match=f"{method}: wanted wake_up first"):
                    llm.collective_rpc(method)
            llm.start_weight_update()
            with pytest.raises(RuntimeError, match="update_weights: wanted wake_up first"):
                llm.update_weights({"update_info": {"path": folder.name}})
            llm.wake_up()
            llm.update_weights({"update_info": {"path": folder.name}})
            llm.finish_weight_update()
            assert engine.ask(ask)[0].token_ids == wanted.token_ids


def test_weights_that_are_lost_during_an_update_must_arrive_again(
    checkpoint: Callable[[str], Path],
) -> None:
    folder = checkpoint("mha")
    ask = Request(random_prompt(9), {**BLOCKS, "ignore_eos": True})
    with running(folder, enable_sleep_mode=True, **disk_updates(folder.parent)) as engine:
        llm, info = engine.llm, {"update_info": {"path": folder.name}}
        (wanted,) = engine.ask(ask)
        llm.start_weight_update()
        llm.update_weights(info)
        with pytest.raises(RuntimeError, match="reset_weights: wanted finish_weight_update first"):
            llm.collective_rpc("reset_weights")
        llm.sleep(level=2, mode="keep")
        llm.wake_up()
        with pytest.raises(ValueError, match="tensors did not arrive"):
            llm.finish_weight_update()
        llm.start_weight_update()
        llm.update_weights(info)
        llm.finish_weight_update()
        assert engine.ask(ask)[0].token_ids == wanted.token_ids


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_have_their_slots_again(
    level: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Slots lose their contents; one adapter is replaced, and one is loaded, during the sleep."""
    folder, ask = checkpoint("mha"), Request(random_prompt(9), {**BLOCKS, "ignore_eos": True})
    paths = [save_adapter(tmp_path / str(n), random_adapter(folder, seed=n)) for n in range(4)]
    settings = {"enable_sleep_mode": True, "enable_lora": True, "max_loras": 2}
    with running(folder, max_cpu_loras=3, **settings) as engine:
        calls = engine.llm.llm_engine

        def answer(adapter: Any) -> list[int]:
            prompt: Any = {"prompt_token_ids": ask.prompt}
            params = sampling_params(ask)
            (output,) = engine.llm.generate(prompt, params, lora_request=adapter, use_tqdm=False)
            return to_answer(output).token_ids

        a, b, c = (lora_request(n, k, paths[k - 1]) for n, k in (("a", 1), ("b", 2), ("c", 3)))
        wanted = [answer(adapter) for adapter in (a, b, c, None)]
        replaced = answer(lora_request("d", 4, paths[3]))
        calls.remove_lora(4)
        assert [answer(a), answer(b)] == wanted[:2]
        engine.llm.sleep(level=level)
        assert calls.add_lora(lora_request("a", 1, paths[3], load_inplace=True))
        assert calls.add_lora(c)
        engine.llm.wake_up()
        if level == 2:
            engine.llm.collective_rpc("reload_weights")
        assert [answer(adapter) for adapter in (a, b, c, None)] == [replaced, *wanted[1:]]
        assert engine.is_idle()


def test_memory_of_keys_alone_is_lent(checkpoint: Callable[[str], Path]) -> None:
    ask = Request(random_prompt(70), {**GRID, "ignore_eos": True})
    with running(checkpoint("sdar")) as engine:
        (wanted,) = engine.ask(ask)
        assert engine.is_idle()
        engine.llm.sleep(level=0)
        engine.core.release_kv_cache_memory()
        assert engine.runner.caches.reserved_bytes == 0
        engine.llm.wake_up()
        assert engine.ask(ask)[0].token_ids == wanted.token_ids


def test_sleep_wants_its_flag(checkpoint: Callable[[str], Path]) -> None:
    with running(checkpoint("mha")) as engine:
        with pytest.raises(ValueError, match="sleep: given level 1; wanted --enable-sleep-mode"):
            engine.llm.sleep(level=1)
        engine.core.resume_scheduler()
        assert engine.ask(Request(random_prompt(5), BLOCKS))


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_weights_come_back_where_they_were(
    quantization: str | None, checkpoint: Callable[[str], Path]
) -> None:
    """Addresses and captured graphs remain valid, and the GPU has the memory during the sleep."""
    ask = Request(random_prompt(9), {**BLOCKS, "ignore_eos": True})
    settings = {"quantization": quantization, "dtype": "bfloat16", "enable_sleep_mode": True}
    with running(checkpoint("mha"), **settings) as engine:
        (wanted,) = engine.ask(ask)
        model, graphs = engine.runner.model, len(engine.runner.graphs or ())
        places = [p.data_ptr() for p in model.parameters()]
        free_bytes = torch.cuda.mem_get_info()[0]
        for level in (1, 2):
            engine.llm.sleep(level=level)
            assert torch.cuda.mem_get_info()[0] > free_bytes
            engine.llm.wake_up()
            if level == 2:
                engine.llm.collective_rpc("reload_weights")
            assert [p.data_ptr() for p in model.parameters()] == places
            assert engine.ask(ask)[0].token_ids == wanted.token_ids
        assert len(engine.runner.graphs or ()) == graphs


@pytest.mark.gpu
def test_slots_come_back_where_they_were(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The GPU has the memory of the slots during the sleep."""
    folder = checkpoint("mha")
    path = save_adapter(tmp_path / "a", random_adapter(folder))
    adapter, ask = lora_request("a", 1, path), Request(random_prompt(9), BLOCKS)
    settings = {"enable_lora": True, "max_loras": 64, "max_lora_rank": 512}
    with running(folder, dtype="bfloat16", enable_sleep_mode=True, **settings) as engine:
        prompt: Any = {"prompt_token_ids": ask.prompt}
        arguments: Any = (prompt, sampling_params(ask))
        (wanted,) = engine.llm.generate(*arguments, lora_request=adapter, use_tqdm=False)
        free_bytes = torch.cuda.mem_get_info()[0]
        slot_bytes = engine.runner.adapters.take_report().slot_bytes
        for level in (1, 2):
            engine.llm.sleep(level=level)
            assert torch.cuda.mem_get_info()[0] >= free_bytes + 64 * slot_bytes
            engine.llm.wake_up()
            if level == 2:
                engine.llm.collective_rpc("reload_weights")
            (answer,) = engine.llm.generate(*arguments, lora_request=adapter, use_tqdm=False)
            assert to_answer(answer).token_ids == to_answer(wanted).token_ids

# SPDX-License-Identifier: Apache-2.0
"""Weights that change in place, by tensor or for the whole engine, while requests run."""

import queue
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import block_loops, dispatch
from reference.models import KeyValues, load_reference
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

from tests import golden
from tests.checkpoint_files import weights_of
from tests.checkpoints import (
    BLOCK_CASES,
    CASES,
    DIFFULLAMA_CASE,
    FAMILY_CASES,
    MASK_ID,
    Case,
    make_checkpoint,
    random_prompt,
)
from tests.engine.cases import ADABLOCK
from tests.engine.harness import (
    BLOCKS,
    NOISY,
    Engine,
    Request,
    engine_config,
    finish,
    logged,
    rows_of_launches,
    running,
    sampling_params,
    start,
)
from vllm.diffusion.config import served_model
from vllm.diffusion.request.decision import attach, decide, request_values_of

ALL: dict[str, Case] = {**CASES, **FAMILY_CASES, **BLOCK_CASES, "diffullama": DIFFULLAMA_CASE}
TRACED = {"return_trajectory": True}


def other(folder: Path, name: str) -> Path:
    """Write a checkpoint of the same shapes with other weights."""
    case = ALL[name]
    fused = {"fused_experts": case.fused_experts}
    return make_checkpoint(
        folder, family=case.family, seed=case.seed + 50, **fused, **case.overrides
    )


def updatable(root: Path, **settings: Any) -> dict[str, Any]:
    """Return settings of an engine that loads weights from files below a folder."""
    dllm = {"longest_pause_ms": 0, "weight_update_root": str(root), **settings}
    return {"additional_config": {"dllm": dllm}, "weight_transfer_config": {"backend": "disk"}}


def update(engine: Engine, *paths: str, version: str | None = None) -> None:
    engine.llm.start_weight_update()
    for path in paths:
        engine.llm.update_weights({"update_info": {"path": path}})
    engine.llm.finish_weight_update(version)


def checksums(engine: Engine) -> dict[str, str]:
    return {
        name: digest
        for actual in engine.llm.collective_rpc("compute_weight_checksums")
        for name, digest in actual.items()
    }


@pytest.mark.parametrize("name", ["model.transformer.wte.weight", "model.transformer.ln_f.weight"])
def test_one_tensor_is_loaded_alone(
    name: str, engine: Engine, checkpoint: Callable[[str], Path]
) -> None:
    """No other tensor changes. A tensor of another shape, or of no module, is still refused."""
    before, weights = checksums(engine), weights_of(checkpoint("mha"))
    model = engine.runner.model
    assert len(model.load_weights([(name, weights[name] * 2)])) == 1
    after = checksums(engine)
    assert sum(before[key] != after[key] for key in before) == 1
    for given, match in ((weights[name][:8], "given shape"), (weights[name], "not part of")):
        wrong = name if match == "given shape" else f"other.{name}"
        with pytest.raises(ValueError, match=match):
            model.load_weights([(wrong, given)])
    model.load_weights([(name, weights[name])])
    assert checksums(engine) == before


def test_workers_have_upstreams_names_for_extensions(engine: Engine) -> None:
    """Worker extensions of verl and OpenRLHF read these names."""

    def read(worker: Any) -> bool:
        config, runner = worker.vllm_config, worker.model_runner
        is_same = runner.vllm_config is config and worker.model_config is config.model_config
        return is_same and worker.device == runner.device and runner.model is worker.get_model()

    assert engine.llm.collective_rpc(read) == [True]


def test_a_transfer_engine_gets_one_target(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's engines may keep what they have learned about tensors by their target."""
    with running(checkpoint("mha"), **updatable(tmp_path)) as engine:
        transfers = WeightTransferEngineFactory.create_engine
        targets = list[Any]()

        def create(*args: Any, **named: Any) -> Any:
            transfer = transfers(*args, **named)
            use = transfer.set_weight_update_target

            def used(target: Any, *rest: Any) -> None:
                targets.append(target)
                use(target, *rest)

            monkeypatch.setattr(transfer, "set_weight_update_target", used)
            return transfer

        monkeypatch.setattr(WeightTransferEngineFactory, "create_engine", create)
        path = other(tmp_path / "next", "mha")
        update(engine, str(path))
        update(engine, str(path))
    assert len(targets) == 2
    assert targets[0] is targets[1]


class Weights(WeightSource):
    """The weights of a trainer, by name."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, w.dtype, tuple(w.shape)) for n, w in self.weights.items()]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


class Broadcasts:
    """Stands in for the NCCL group of a trainer and a worker in this process.

    Args:
        sent: tensors on their way.
        is_sender: whether this is the trainer's end.
    """

    disabled = False

    def __init__(self, sent: queue.Queue[Tensor], *, is_sender: bool) -> None:
        self._sent, self._is_sender = sent, is_sender

    def broadcast(self, tensor: Tensor, src: int, stream: Any) -> None:
        if self._is_sender:
            self._sent.put(tensor.clone())
        else:
            tensor.copy_(self._sent.get(timeout=60))

    def destroy(self) -> None:
        """Leave the group."""


class InProcess:
    """The calls that upstream's trainer sends to a server, for an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._llm = engine.llm
        self.start_weight_update = engine.llm.start_weight_update
        self.finish_weight_update = engine.llm.finish_weight_update
        self.infos = list[dict[str, Any]]()  # infos of the updates

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": info})

    def update_weights(self, info: dict[str, Any]) -> None:
        self.infos.append(info)
        self._llm.update_weights({"update_info": info})


def test_every_update_by_nccl_loads_tensors(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer sends names and shapes once. Later updates repeat them for the same target."""
    sent = queue.Queue[Tensor]()
    ends = {is_sender: Broadcasts(sent, is_sender=is_sender) for is_sender in (False, True)}
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda *_: ends[False])
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda _: ends[True])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    own = weights_of(checkpoint("mha"))
    source = Weights(weights_of(other(tmp_path / "next", "mha")))
    where = {"master_address": "127.0.0.1", "master_port": 1}
    info = nccl_engine.NCCLTrainerInitInfo(rank=0, world_size=2, packed=False, **where)
    with running(checkpoint("mha"), weight_transfer_config={"backend": "nccl"}) as engine:
        before, client = checksums(engine), InProcess(engine)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        trainer.send_weights()
        after = checksums(engine)
        assert all(before[name] != after[name] for name in before)
        source.weights = own
        trainer.send_weights()
        assert checksums(engine) == before
        assert [len(info["names"]) for info in client.infos] == [len(own), 0]
        assert sent.empty()


CHANGED = [
    *(("mha", None), ("tied", None), ("dream", None), ("diffullama", None), ("moe_fused", None)),
    *(("moe_bias", None), ("sdar", None), ("llada2", None), ("fast_dllm", None)),
    *(("mha", "fp8"), ("mha", "int4"), ("moe", "int4"), ("moe", "fp8")),
]


@pytest.mark.parametrize(("name", "quantization"), CHANGED, ids=str)
def test_an_update_gives_a_fresh_engine(
    name: str, quantization: str | None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tensors and answers are those of the other checkpoint, in any order of its tensors."""
    folder, new = checkpoint(name), other(tmp_path / "new", name)
    parameters = {"gen_length": 8, "block_length": 8, "ignore_eos": True, "seed": 1, **TRACED}
    ask = Request(random_prompt(20), parameters)
    if name in ("dream", "diffullama"):
        del ask.extra["block_length"]
    weights = list(weights_of(new).items())
    random.Random(7).shuffle(weights)
    for number in range(3):
        (tmp_path / f"part{number}").mkdir()
        save_file(dict(weights[number::3]), tmp_path / f"part{number}" / "some.safetensors")
    with running(new, quantization=quantization) as engine:
        wanted, fresh = engine.ask(ask)[0], checksums(engine)
    with running(folder, quantization=quantization, **updatable(tmp_path)) as engine:
        before = engine.ask(ask)[0]
        update(engine, "part1", "part0", str(tmp_path / "part2" / "some.safetensors"), version="b")
        assert checksums(engine) == fresh
        (answer,) = engine.ask(ask)
    assert answer.token_ids == wanted.token_ids != before.token_ids
    actual = answer.report["trajectory"]
    assert (actual["weight_version"], actual["weight_steps"]) == ("b", [[1, 1]])
    assert actual["logprobs"] == wanted.report["trajectory"]["logprobs"]


class Changing:
    """A model that becomes another one after some forward passes and recomputes cached keys."""

    def __init__(self, models: tuple[Any, Any], num_forwards: int, prompt_length: int) -> None:
        self._models, self._left = models, num_forwards
        self.logit_shift = models[0].logit_shift
        self._row: Tensor | None = None
        self._frozen = prompt_length

    def _model(self) -> tuple[Any, bool]:
        """Return the model of this forward pass, and whether this is its first one."""
        self._left -= 1
        return self._models[self._left < 0], self._left == -1

    def logits(self, ids: Tensor, block_length: int | None = None) -> Tensor:
        actual: Tensor = self._model()[0].logits(ids, block_length)
        return actual

    def forward_with_kv(
        self, ids: Tensor, positions: Any, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        model, is_new = self._model()
        if self._row is None:
            self._row = ids.clone()
        self._row[:, list(positions)] = ids
        if not is_new:
            return model.forward_with_kv(ids, positions, past)  # type: ignore[no-any-return]
        every = range(self._row.shape[1])
        logits, kept = model.forward_with_kv(self._row, every, None)
        # A frozen cache only contains the prompt.
        if past is not None and len(past.positions) < len(every):
            past.layers[:]
            object.__setattr__(past, "layers", kept.keep(past.positions).layers)
        return logits[:, list(positions)], kept


CACHES = {
    "none": {**BLOCKS, "steps": 16},
    "prefix": {**BLOCKS, "cache": "prefix"},
    "dual": {**BLOCKS, "cache": "dual"},
    "frozen": {**BLOCKS, "cache": "frozen"},
    "adablock, dual": {**ADABLOCK, "gen_length": 32, "block_length": 8, "cache": "dual"},
    "threshold, dual": {"gen_length": 32, "block_length": 8, "threshold": 0.6, "cache": "dual"},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_before", [1, 6])
def test_a_request_goes_on_as_if_the_model_had_changed_at_that_step(
    cache: str, num_before: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A paused request continues, and its trajectory names the first step with new weights."""
    folder, new = checkpoint("mha"), other(tmp_path / "new", "mha")
    models = load_reference(folder), load_reference(new)
    prompt, extra = random_prompt(20, 3), CACHES[cache]
    options = {"algorithm": "threshold" if "threshold" in extra else "semi_ar", **extra}
    if "delimiter_ids" in options:
        options["delimiter_threshold"] = 0.3
    wanted = dispatch.run(
        Changing(models, num_before, len(prompt)), prompt, ids=golden.IDS, **options
    )
    with running(folder, **updatable(tmp_path)) as engine:
        start(engine, "a", Request(prompt, {**extra, "ignore_eos": True, **TRACED}))
        core = engine.core
        while engine.runner.canvases.get(req := next(iter(engine.runner.canvases), "")) is None or (
            engine.runner.canvases[req].num_steps < num_before
        ):
            engine.llm.llm_engine.step()
        core.pause_scheduler("keep", clear_cache=False)
        update(engine, "new", version="b")
        engine.llm.llm_engine.step()
        core.resume_scheduler()
        answer = finish(engine)["a"]
    assert answer.token_ids == wanted.ids
    actual = answer.report["trajectory"]
    assert actual["weight_steps"] == [[0, 1], [1, num_before + 1]]
    assert actual["weight_version"] is None


def test_a_label_is_of_all_answers_of_its_weights(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Answers that take steps after an update, but before its label, also get the label."""
    other(tmp_path / "new", "mha")
    ask = Request(random_prompt(20), {"gen_length": 16, "ignore_eos": True, **TRACED})
    with running(checkpoint("mha"), **updatable(tmp_path)) as engine:
        update(engine, "new")
        start(engine, "a", ask)
        for _ in range(3):
            engine.llm.llm_engine.step()
        engine.llm.update_weight_version("b")
        started, later = finish(engine)["a"], engine.ask(ask)[0]
    labels = [answer.report["trajectory"]["weight_version"] for answer in (started, later)]
    assert labels == ["b", "b"]


@pytest.mark.parametrize("cache", ["exact", "none"])
def test_blocks_go_on_with_the_changed_model(
    cache: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A block-causal family computes all cached blocks again."""
    folder, new = checkpoint("sdar"), other(tmp_path / "new", "sdar")
    model = Changing((load_reference(folder), load_reference(new)), 9, 70)
    prompt, parameters = random_prompt(70, 3), {"gen_length": 24, "block_length": 8}

    def logits_of(tokens: Any) -> Tensor:
        return model.logits(torch.tensor([list(tokens)]), 8)[0]

    wanted = block_loops.run(
        logits_of, prompt, algorithm="semi_ar", mask_id=MASK_ID, steps_per_block=8, **parameters
    )
    extra = {**parameters, "algorithm": "semi_ar", "steps_per_block": 8, "cache": cache}
    with running(folder) as engine:
        start(engine, "a", Request(prompt, {**extra, "ignore_eos": True, **TRACED}))
        while not any(c.num_steps == 9 for c in engine.runner.canvases.values()):
            engine.llm.llm_engine.step()
        engine.runner.model.load_weights(weights_of(new).items())
        answer = finish(engine)["a"]
    assert answer.token_ids == wanted.answer
    assert answer.report["trajectory"]["weight_steps"] == [[0, 1], [1, 10]]


@pytest.mark.parametrize("cache", ["none", "dual", "frozen"])
def test_answers_to_one_prompt_share_nothing_old(
    cache: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Later answers reuse the prompt of the first one, unless the weights have changed since."""
    folder, new = checkpoint("mha"), other(tmp_path / "new", "mha")
    extra = {**BLOCKS, "cache": cache, "ignore_eos": True, "temperature": 1.0}
    prompt = random_prompt(100)

    def begin(engine: Engine) -> None:
        served = served_model(engine.llm.llm_engine.vllm_config)
        for number in range(3):
            sampling = sampling_params(Request(prompt, {**extra, "seed": 5}))
            decided = decide(request_values_of(sampling), served, prompt).with_answers(3)
            attach(sampling, decided, number)
            tokens: Any = {"prompt_token_ids": prompt}
            engine.llm.llm_engine.add_request(str(number), tokens, sampling)

    def answers_of(engine: Engine) -> list[list[int]]:
        return [answer.token_ids for _, answer in sorted(finish(engine).items())]

    with running(new) as engine:
        begin(engine)
        wanted = answers_of(engine)
    with running(folder) as engine:
        begin(engine)
        while not engine.runner.canvases:
            engine.llm.llm_engine.step()
        before = len(engine.runner.canvases)
        engine.runner.model.load_weights(weights_of(new).items())
        actual = answers_of(engine)
        assert engine.is_idle()
    assert before == 1 and actual[1:] == wanted[1:]


def test_old_pages_are_never_read(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Old pages of earlier prompts and of a running request are not used, even without a pause."""
    new = other(tmp_path / "new", "sdar")
    parameters = {"gen_length": 24, "block_length": 8, "ignore_eos": True}
    ask = Request(random_prompt(150), parameters)
    with running(new, enable_prefix_caching=True) as engine:
        wanted = engine.ask(ask)[0].token_ids
    settings = {**updatable(tmp_path), "enable_prefix_caching": True}
    with running(checkpoint("sdar"), **settings) as engine:
        engine.ask(ask)
        assert engine.outputs(ask)[0].num_cached_tokens >= 128
        update(engine, "new")
        again = engine.outputs(ask)[0]
        assert list(again.outputs[0].token_ids) == wanted
        assert not again.num_cached_tokens
        assert engine.outputs(ask)[0].num_cached_tokens >= 128
        start(engine, "b", ask)
        engine.llm.llm_engine.step()
        engine.runner.model.load_weights(weights_of(checkpoint("sdar")).items())
        assert finish(engine)["b"].num_forwards


def test_a_delayed_cache_is_computed_again(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"algorithm": "multi_block", "cache": "delayed", "cache_delay_iter": 1}
    ask = Request(
        random_prompt(20), {**parameters, "gen_length": 32, "block_length": 8, "threshold": 1.5}
    )
    with running(checkpoint("mha")) as engine:
        rows = rows_of_launches(engine, monkeypatch)
        engine.ask(ask)
        first_window = next(i for i, number in enumerate(rows) if number < 52)
        rows.clear()
        start(engine, "a", ask)
        while len(rows) <= first_window:
            engine.llm.llm_engine.step()
        engine.runner.model.load_weights(weights_of(checkpoint("mha")).items())
        count = len(rows)
        finish(engine)
        assert rows[count - 1] < 52 and rows[count] == 52


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("cache", ["none", "dual", "frozen"])
def test_nothing_is_lost_without_a_pause(
    cache: str, runs_ahead: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Requests with common prompts end with whole answers over updates and an abort."""
    folder = checkpoint("mha")
    for name, seed in (("a", 14), ("b", 64)):
        make_checkpoint(tmp_path / name, seed=seed)
    parameters = {**NOISY, "cache": cache, "ignore_eos": True, **TRACED, "temperature": 1.0}
    with running(folder, **updatable(tmp_path)) as engine:
        engine.loop.runs_ahead = runs_ahead
        for number in range(5):
            start(engine, str(number), Request(random_prompt(20), {**parameters, "seed": number}))
        gone = start(engine, "gone", Request(random_prompt(20), parameters))
        answers: dict[str, Any] = {}
        for number in range(3):
            engine.llm.llm_engine.step()
            engine.llm.start_weight_update()
            if number == 1:
                engine.llm.llm_engine.abort_request([gone], internal=True)
            engine.llm.llm_engine.step()  # a step that computes nothing
            engine.llm.update_weights({"update_info": {"path": "ab"[number % 2]}})
            engine.llm.finish_weight_update()
        answers |= finish(engine)
        assert sorted(answers) == ["0", "1", "2", "3", "4"]
        assert engine.is_idle()
    for answer in answers.values():
        actual = answer.report["trajectory"]
        assert MASK_ID not in answer.token_ids
        generations = [generation for generation, _ in actual["weight_steps"]]
        assert generations == sorted(set(generations)) and generations[-1] == 3
        steps = [step for _, step in actual["weight_steps"]]
        assert steps == sorted(set(steps)) and steps[0] == 1


def test_what_cannot_be_is_told_in_one_line(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(checkpoint("mha"))
    shutil.copytree(checkpoint("gqa"), root / "shapes")
    (root / "empty").mkdir()
    (root / "text.safetensors").write_text("no tensors")
    name = "model.transformer.ln_f.weight"
    whole = torch.ones_like(weights_of(checkpoint("mha"))[name], dtype=torch.int32)
    save_file({name: whole}, root / "whole.safetensors")
    with running(checkpoint("mha"), **updatable(root)) as engine:
        llm, ask = engine.llm, Request(random_prompt(9), {**BLOCKS, "ignore_eos": True})
        before = engine.ask(ask)[0].token_ids
        for call, match in (
            (lambda: llm.update_weights({"update_info": {}}), "wanted start_weight_update first"),
            (llm.finish_weight_update, "wanted start_weight_update first"),
            (llm.start_draft_weight_update, "no draft model"),
        ):
            with pytest.raises(RuntimeError, match=match):
                call()
        with pytest.raises(ValueError, match="init_info: given port; wanted no fields"):
            llm.init_weight_transfer_engine({"init_info": {"port": 1}})
        for info, match in (
            *(({"path": path}, "wanted one below") for path in ("link", "../other", "/etc")),
            ({"path": "empty"}, "path: given 'empty'; wanted a file of safetensors"),
            ({"path": "missing"}, "path: given 'missing'; wanted a file of safetensors"),
            ({"path": "text.safetensors"}, "given 'text.safetensors'; wanted a file of safet"),
            ({"path": "whole.safetensors"}, "given torch.int32; wanted floating point"),
            ({"path": "shapes"}, "given shape"),
            ({"path": 3}, "path: given 3; wanted a string"),
            ({}, "update_info: given no fields; wanted path alone"),
            ({"path": "empty", "names": []}, "update_info: given path, names; wanted path alone"),
        ):
            llm.start_weight_update()
            with pytest.raises(RuntimeError, match="wanted finish_weight_update first"):
                llm.start_weight_update()
            with pytest.raises(RuntimeError, match="wanted finish_weight_update first"):
                llm.shutdown_weight_transfer_engine()
            with pytest.raises(RuntimeError, match="given a list of 0; wanted one entry for each"):
                llm.update_weights({"update_info": []})
            with pytest.raises(ValueError, match=match):
                llm.update_weights({"update_info": info})
        llm.collective_rpc("cancel_update")  # cancels the last update, and repairs no earlier one
        start(engine, "a", ask)
        for _ in range(3):
            llm.llm_engine.step()
        (canvas,) = engine.runner.canvases.values()
        assert canvas.num_steps == 0  # no step runs before an update has ended
        llm.collective_rpc("reload_weights")
        assert finish(engine)["a"].token_ids == before
        llm.shutdown_weight_transfer_engine()
    wanted = pytest.raises(RuntimeError, match="weight_transfer_config: given none; wanted")
    with running(checkpoint("mha")) as engine:
        with wanted:
            engine.llm.start_weight_update()
        assert engine.ask(ask)[0].token_ids == before  # refused updates have changed no weights


def test_missing_tensors_are_logged_or_an_error(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = weights_of(checkpoint("mha"))
    save_file({k: v for k, v in weights.items() if "wte" not in k}, tmp_path / "some.safetensors")
    from vllm.diffusion.engine.worker import weight_worker

    with running(checkpoint("mha"), **updatable(tmp_path)) as engine:
        actual = logged(weight_worker.logger, update, engine, "some.safetensors")
        missing = "1 tensors did not arrive: model.transformer.wte"
        assert any(missing in text for _, text in actual)
    settings = updatable(tmp_path, weight_update_complete=True)
    refused = pytest.raises(ValueError, match=missing)
    with running(checkpoint("mha"), **settings) as engine, refused:
        update(engine, "some.safetensors")


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("weight_transfer_config", {"backend": "sparse_nccl"}, "'sparse_nccl'; wanted one of nccl"),
        ("logprobs_mode", "processed_logits", "'processed_logits'; wanted raw_logprobs"),
    ],
)
def test_what_does_not_work_stops_the_start(
    name: str, given: Any, match: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=match):
        engine_config(checkpoint("mha"), **{name: given})


def test_reset_zeroes_every_weight(checkpoint: Callable[[str], Path]) -> None:
    with running(checkpoint("moe"), quantization="fp8") as engine:
        before = checksums(engine)
        engine.llm.collective_rpc("reset_weights")
        after = checksums(engine)
        assert after.keys() == before.keys()
        assert sum(before[name] == after[name] for name in before) == 0
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint("moe"))})
        assert checksums(engine) == before


def test_upstreams_engines_find_nothing_to_move(checkpoint: Callable[[str], Path]) -> None:
    """Upstream's reload of layers skips the model, because its stand-in has no parameters."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from vllm.diffusion.engine.worker.weight_worker import WeightSink

    with running(checkpoint("mha")) as engine:
        before = checksums(engine)
        sink = WeightSink(engine.runner.model)
        initialize_layerwise_reload(sink)
        finalize_layerwise_reload(sink, None)
        assert not list(sink.parameters()) and checksums(engine) == before


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield

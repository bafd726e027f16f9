# SPDX-License-Identifier: Apache-2.0
"""Requests with LoRA adapters get the answers of the merged checkpoint, whoever shares the step."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.adapter_files import (
    ATTENTION,
    adaptable,
    lora_request,
    merge,
    named,
    random_adapter,
    save_adapter,
    without_prefix,
)
from tests.checkpoints import make_checkpoint, random_prompt
from tests.engine.cases import PLANS, mixed_asks
from tests.engine.harness import (
    BLOCKS,
    POOL_BYTES,
    Engine,
    Request,
    Response,
    engine_config,
    record_plans,
    running,
    sampling_params,
    shrink,
    speculating,
    step,
    to_answer,
    tokens,
)
from vllm.diffusion.adapters.draft_adapter import DraftAdapter
from vllm.diffusion.adapters.lora_flags import SlotSizes
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.engine.scheduler.waiting import MAX_OVERTAKEN
from vllm.diffusion.engine.worker import pool_budget
from vllm.diffusion.engine.worker.long_step_runner import LongStepRunner
from vllm.diffusion.memory import Admission, Demand
from vllm.diffusion.memory.plan import Plan

GAIN = 0.5  # factor of the adapters' numbers, which then change most tokens
SHORT: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8, "seed": 7}
FULL = ("mha", "gqa", "padded_vocab", "bias", "tied", "qk_norm", "scaled", "grouped", "dream")
FULL_WITH_EXPERTS = ("moe", "moe_fused", "moe_dense_mix", "diffullama")
IN_BLOCKS = (
    *("sdar", "sdar_tied", "sdar_moe_mix", "llada2", "llada2_dense_first", "llada2_all_experts"),
    *("llada22", "stable_diffcoder", "nemotron", "fast_dllm", "idlm"),
)


def ask(engine: Engine, asks: Sequence[Request], adapters: Any = None) -> list[Response]:
    """Run requests together; `adapters` is one for all of them, or a list with one for each."""
    outputs = engine.llm.generate(
        [{"prompt_token_ids": list(one.prompt)} for one in asks],
        [sampling_params(one) for one in asks],
        use_tqdm=False,
        lora_request=adapters,
    )
    return [to_answer(output) for output in outputs]


def scores_of(engine: Engine, prompt: list[int], adapter: Any) -> torch.Tensor:
    """Return the log probabilities of all ordinary tokens at some positions of a sequence."""
    score = {"positions": [8, 9, 13], "token_ids": [list(range(245))] * 3}
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": prompt}],
        sampling_params(Request(prompt, {"score": score})),
        use_tqdm=False,
        lora_request=adapter,
    )
    return torch.tensor(output.kv_transfer_params["dllm"]["scores"]["logprobs"])


@pytest.fixture(scope="module")
def adapter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a random adapter for a checkpoint."""

    def make(checkpoint: Path, *, rank: int = 8, seed: int = 0, **more: Any) -> Path:
        options = {key: more.pop(key) for key in ("modules", "ranks", "gain") if key in more}
        options.setdefault("gain", GAIN)
        tensors = random_adapter(checkpoint, rank=rank, seed=seed, **options)
        return save_adapter(tmp_path_factory.mktemp("adapter"), tensors, rank=rank, **more)

    return make


def merged_answers(
    checkpoint: Path, adapter: Path, target: Path, asks: Sequence[Request]
) -> list[Response]:
    with running(merge(checkpoint, adapter, target)) as engine:
        return ask(engine, asks)


@pytest.mark.parametrize("name", [*FULL, *FULL_WITH_EXPERTS, *IN_BLOCKS])
def test_every_family_answers_as_merged(
    name: str, checkpoint: Callable[[str], Path], adapter_of: Any, tmp_path: Path
) -> None:
    """All matrices, then attention alone; two requests with other prompts share each step."""
    folder = checkpoint(name)
    seeded = {**BLOCKS, "seed": 5}  # some families draw by default
    asks = [Request(random_prompt(20), seeded), Request(random_prompt(7, seed=1), SHORT)]
    everything = adapter_of(folder, rank=8)
    attention = adapter_of(folder, rank=4, seed=1, modules=named(*ATTENTION))
    wanted = {
        path: merged_answers(folder, path, tmp_path / path.name, asks)
        for path in (everything, attention)
    }
    prompt = random_prompt(20, seed=2)
    with running(folder, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        plain = ask(engine, asks)
        for number, (path, answers) in enumerate(wanted.items(), 1):
            adapter = lora_request(path.name, number, path)
            assert tokens(ask(engine, asks, adapter)) == tokens(answers)
            assert tokens(answers) != tokens(plain)
        assert tokens(ask(engine, asks)) == tokens(plain)
        scores = scores_of(engine, prompt, lora_request(everything.name, 1, everything))
        assert engine.is_idle()
    with running(tmp_path / everything.name) as engine:
        expected = scores_of(engine, prompt, None)
    assert (scores - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("module", ["q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj"])
def test_each_matrix_alone(
    module: str, checkpoint: Callable[[str], Path], adapter_of: Any, tmp_path: Path
) -> None:
    folder = checkpoint("gqa")
    path = adapter_of(folder, modules=named(module), gain=1.0)
    asks = [Request(random_prompt(20), SHORT)]
    wanted = merged_answers(folder, path, tmp_path / "merged", asks)
    with running(folder, enable_lora=True) as engine:
        assert tokens(ask(engine, asks, lora_request("a", 1, path))) == tokens(wanted)


@pytest.mark.parametrize("is_head", [False, True], ids=["mlp", "head"])
def test_the_two_modules_with_the_same_last_name(
    is_head: bool, checkpoint: Callable[[str], Path], adapter_of: Any, tmp_path: Path
) -> None:
    """In LLaDA `ff_out` is the last matrix of each MLP, and the head."""
    folder = checkpoint("gqa")
    head = "model.transformer.ff_out"
    path = adapter_of(
        folder, modules=lambda name: name.endswith("ff_out") and (name == head) == is_head
    )
    asks = [Request(random_prompt(20), SHORT)]
    wanted = merged_answers(folder, path, tmp_path / "merged", asks)
    with running(folder, enable_lora=True) as engine:
        assert tokens(ask(engine, asks, lora_request("a", 1, path))) == tokens(wanted)


CONFIGS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"v_proj": 4, "blocks.1.up_proj": 2},
        "alpha_pattern": {"q_proj": 4, "attn_out": 32},
        "ranks": {"v_proj": 4, "blocks.1.up_proj": 2},
    },
    "some layers": {"modules": lambda name: ".blocks.1." in name},
    "rank 1": {"rank": 1},
    "the highest rank": {"rank": 16},
    "pickled": {"file": "adapter_model.bin"},
}


@pytest.mark.parametrize("case", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_form_of_an_adapter(
    case: dict[str, Any], checkpoint: Callable[[str], Path], adapter_of: Any, tmp_path: Path
) -> None:
    folder = checkpoint("mha")
    path = adapter_of(folder, **case)
    asks = [Request(random_prompt(20), SHORT)]
    wanted = merged_answers(folder, path, tmp_path / "merged", asks)
    with running(folder, enable_lora=True) as engine:
        assert tokens(ask(engine, asks, lora_request("a", 1, path))) == tokens(wanted)


def test_names_of_tensors_and_narrow_dtypes(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Names may lack PEFT's prefix or have an adapter's name; numbers may be rounded."""
    folder = checkpoint("mha")
    tensors = {k: t.bfloat16() for k, t in random_adapter(folder, gain=GAIN).items()}
    bare = without_prefix(tensors.items())
    with_name = {k.replace(".weight", ".default.weight"): t for k, t in tensors.items()}
    paths = [
        save_adapter(tmp_path / f"form {i}", t) for i, t in enumerate((tensors, bare, with_name))
    ]
    asks = [Request(random_prompt(20), SHORT)]
    wanted = merged_answers(folder, paths[0], tmp_path / "merged", asks)
    with running(folder, enable_lora=True, max_cpu_loras=3) as engine:
        for number, path in enumerate(paths, 1):
            answers = ask(engine, asks, lora_request(path.name, number, path))
            assert tokens(answers) == tokens(wanted)


@pytest.fixture(scope="module")
def parts(checkpoint: Callable[[str], Path], adapter_of: Any) -> tuple[Path, list[Path]]:
    """Return a checkpoint and three adapters for it, of other modules and ranks."""
    folder = checkpoint("gqa")
    paths = [
        adapter_of(folder, rank=8, seed=1),
        adapter_of(folder, rank=4, seed=2, modules=named(*ATTENTION)),
        adapter_of(folder, rank=16, seed=3, modules=named("up_proj", "ff_out")),
    ]
    return folder, paths


ALGORITHMS: list[tuple[int, dict[str, Any]]] = [
    (20, BLOCKS),
    (9, {**SHORT, "cache": "dual"}),
    (13, {**SHORT, "cache": "prefix"}),
    (11, {**SHORT, "cache": "delayed", "algorithm": "multi_block", "steps": None}),
    (20, {**SHORT, "cfg_scale": 0.7}),
    (7, {"gen_length": 32, "block_length": 16, "threshold": 0.7}),
    (15, {**SHORT, "cache": "frozen"}),
    (12, {**SHORT, "temperature": 0.8, "seed": 7}),
]


@pytest.fixture(scope="module")
def mixed(parts: tuple[Path, list[Path]]) -> Iterator[tuple[Engine, list[Any]]]:
    """Return an engine with two slots, and three adapters."""
    folder, paths = parts
    with running(folder, enable_lora=True, max_loras=2, max_cpu_loras=3) as engine:
        yield engine, [lora_request(f"a{n}", n, path) for n, path in enumerate(paths, 1)]


def test_requests_with_other_adapters_share_steps(
    mixed: tuple[Engine, list[Any]], parts: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    engine, adapters = mixed
    folder, paths = parts
    asks = [
        Request(random_prompt(length, seed=length), parameters) for length, parameters in ALGORITHMS
    ]
    asks = [one for one in asks for _ in range(3)]
    chosen = [None, *adapters[:2]] * len(ALGORITHMS)
    together = ask(engine, asks, chosen)
    for index, adapter in enumerate((None, *adapters[:2])):
        own = asks[index::3]
        with running(
            merge(folder, paths[index - 1], tmp_path / str(index)) if adapter else folder
        ) as e:
            assert tokens(together[index::3]) == tokens(ask(e, own))
    assert engine.is_idle()


@pytest.mark.parametrize(
    "sizes",
    [("llada", "d_model", "mlp_hidden_size"), ("dream", "hidden_size", "intermediate_size")],
)
def test_wide_weights_share_a_product_with_the_adapters(
    sizes: tuple[str, ...], adapter_of: Any, tmp_path: Path
) -> None:
    """The first matrices of all slots follow a weight, whose rows are enough."""
    family, *widths = sizes
    folder = make_checkpoint(tmp_path / "wide", family=family, seed=4, **dict.fromkeys(widths, 512))
    paths = [adapter_of(folder, rank=rank, seed=rank) for rank in (8, 3)]
    asks = [
        Request(random_prompt(length, seed=length), {**SHORT, **more})
        for length, more in ((90, {}), (40, {"cache": "frozen"}), (70, {"temperature": 0.7}))
    ]
    wanted = [merged_answers(folder, path, tmp_path / path.name, asks) for path in paths]
    with running(folder) as engine:
        wanted.append(ask(engine, asks))
    with running(folder, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        weights = [
            own for name, own in engine.runner.model.named_parameters() if "layers.0" in name
        ]
        assert sum(own.untyped_storage().nbytes() > own.nbytes for own in weights) >= 4
        adapters = [lora_request(f"a{n}", n, path) for n, path in enumerate(paths, 1)]
        together = ask(engine, [*asks] * 3, [one for one in (*adapters, None) for _ in asks])
        assert tokens(together) == tokens([one for answers in wanted for one in answers])
        engine.llm.llm_engine.remove_lora(1)
        other = lora_request("other", 3, adapter_of(folder, rank=2, seed=9))
        assert tokens(ask(engine, asks, other)) == tokens(
            merged_answers(folder, Path(other.lora_path), tmp_path / "third", asks)
        )


def test_more_adapters_than_slots(mixed: tuple[Engine, list[Any]]) -> None:
    """Requests wait for a slot, and none starves."""
    engine, adapters = mixed
    asks = [Request(random_prompt(10, seed=n), SHORT) for n in range(12)]
    chosen = [adapters[n % 3] for n in range(12)]
    alone = [ask(engine, [one], adapter)[0] for one, adapter in zip(asks, chosen, strict=True)]
    assert tokens(ask(engine, asks, chosen)) == tokens(alone)
    assert engine.is_idle()


def test_a_stream_of_one_adapter_keeps_no_other_out(
    parts: tuple[Path, list[Path]],
) -> None:
    """At most `MAX_OVERTAKEN` later requests start before one that waits for a slot."""
    folder, paths = parts
    with running(folder, enable_lora=True, max_loras=1, max_num_seqs=3) as engine:
        a, b = (lora_request(f"a{n}", n, path) for n, path in enumerate(paths[:2], 1))
        asks = [Request(random_prompt(10, seed=n), {**SHORT, "steps": 2}) for n in range(40)]
        ended = list[str]()
        for number, one in enumerate(asks):
            engine.llm.llm_engine.add_request(
                str(number),
                {"prompt_token_ids": one.prompt},
                sampling_params(one),
                lora_request=b if number == 2 else a,
            )
        while engine.llm.llm_engine.has_unfinished_requests():
            outputs = engine.llm.llm_engine.step()
            ended += [output.request_id for output in outputs if output.finished]
        assert len(ended) == len(asks)
        assert 2 < ended.index("2") <= MAX_OVERTAKEN + 2
        assert engine.is_idle()


def test_narrow_dtypes(checkpoint: Callable[[str], Path], adapter_of: Any, tmp_path: Path) -> None:
    """In bfloat16 the errors are as small as those of the merged checkpoint."""
    folder, prompt = checkpoint("gqa"), random_prompt(20, seed=2)
    path = adapter_of(folder)
    merged = merge(folder, path, tmp_path / "merged")
    with running(merged) as engine:
        exact = scores_of(engine, prompt, None)
    with running(merged, dtype="bfloat16") as engine:
        rounded = scores_of(engine, prompt, None)
    zeros = {k: t * 0 if "lora_B" in k else t for k, t in random_adapter(folder).items()}
    nothing = save_adapter(tmp_path / "zeros", zeros)
    asks = [Request(random_prompt(20), SHORT)]
    with running(folder, dtype="bfloat16", enable_lora=True) as engine:
        scores = scores_of(engine, prompt, lora_request("a", 1, path))
        zero = lora_request("zeros", 2, nothing)
        assert tokens(ask(engine, asks, zero)) == tokens(ask(engine, asks))
    assert (scores - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()


def test_drafts_use_the_adapter(mixed: tuple[Engine, list[Any]]) -> None:
    engine, adapters = mixed
    asks = [
        Request(random_prompt(20), BLOCKS),
        Request(random_prompt(9), {**SHORT, "cache": "dual"}),
    ]
    for most in (1, 4):
        both = [adapters[0], None]
        plain, drafted = ask(engine, asks, both), ask(engine, speculating(asks, most), both)
        assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]
        assert [a.num_steps for a in drafted] == [a.num_steps for a in plain]


def test_several_answers_share_a_prompt_only_under_one_adapter(
    mixed: tuple[Engine, list[Any]],
) -> None:
    engine, adapters = mixed
    for cache in ("none", "dual", "frozen"):
        extra = {**SHORT, "temperature": 0.9, "cache": cache, "ignore_eos": True}
        one = Request(random_prompt(200, seed=3), extra, {"n": 2, "temperature": 0.9})

        def answers(*chosen: Any, one: Request = one) -> list[list[list[int]]]:
            outputs = engine.llm.generate(
                [{"prompt_token_ids": one.prompt}] * len(chosen),
                [sampling_params(one) for _ in chosen],
                use_tqdm=False,
                lora_request=list(chosen),
            )
            return [[list(choice.token_ids) for choice in o.outputs] for o in outputs]

        together = answers(adapters[0], adapters[1])
        assert together == [*answers(adapters[0]), *answers(adapters[1])]
        assert together[0] != together[1]


def test_an_adapter_of_zeros_changes_nothing(
    mixed: tuple[Engine, list[Any]], parts: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    engine, _ = mixed
    tensors = random_adapter(parts[0], rank=4)
    zeros = {k: t * 0 if "lora_B" in k else t for k, t in tensors.items()}
    path = save_adapter(tmp_path / "zeros", zeros, rank=4)
    asks = [Request(random_prompt(20), BLOCKS)]
    assert tokens(ask(engine, asks, lora_request("zeros", 9, path))) == tokens(ask(engine, asks))


def test_the_adaptable_matrices_are_those_of_the_checkpoint(
    checkpoint: Callable[[str], Path],
) -> None:
    from vllm.diffusion.adapters.matrices import Matrices

    for name in ("gqa", "tied", "dream", "moe_dense_mix", "llada2_dense_first", "nemotron"):
        folder = checkpoint(name)
        matrices = Matrices(engine_config(folder).model_config.hf_config)
        shapes = {n: (m.num_rows, m.num_columns) for n, m in matrices.all.items()}
        assert shapes == adaptable(folder)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_chunks_and_groups_of_heads_use_the_adapters(
    plan: Plan, mixed: tuple[Engine, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a chunk keep their adapters, also with rows in host memory."""
    engine, adapters = mixed
    asks = [one for one in mixed_asks() for _ in range(3)]
    chosen = [None, *adapters[:2]] * (len(asks) // 3)
    wanted = tokens(ask(engine, asks, chosen))
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    assert tokens(ask(engine, asks, chosen)) == wanted
    assert engine.is_idle()


def test_measured_peaks_are_the_predicted_ones(
    parts: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured peaks match the plan, from a pool with room for a whole step to a small one."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    folder, (path, *_) = parts
    one = Request(random_prompt(512), {"gen_length": 512, "block_length": 512, "steps": 2})
    settings = {"max_model_len": 2048, "max_num_batched_tokens": 4096, "max_lora_rank": 128}
    seen = set()
    with running(folder, enable_lora=True, **settings) as engine:
        largest, wanted = 0, None
        for share in (1.0, 0.5, 0.25):
            if largest:
                shrink(engine.runner, int(share * largest))
            actual = record_plans(engine, monkeypatch)
            answers = tokens(ask(engine, [one], lora_request("a", 1, path)))
            wanted = wanted or answers
            assert answers == wanted
            largest = largest or max(usage.peak_bytes for _, usage in actual)
            for plan, usage in actual:
                seen.add((plan.is_whole(1024), plan.layout.is_streamed))
                assert usage.peak_bytes <= engine.runner.pool.budget_bytes
                assert usage.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
        assert (True, False) in seen and (False, True) in seen
        without = record_plans(engine, monkeypatch)
        engine.ask(one)
        assert all(usage.peak_bytes < 0.9 * largest for _, usage in without)


def test_slices_of_a_long_step_between_steps_with_other_adapters(
    mixed: tuple[Engine, list[Any]],
) -> None:
    engine, adapters = mixed
    asks = [Request(random_prompt(200), SHORT), *(Request(random_prompt(n), SHORT) for n in (5, 9))]
    chosen = [adapters[0], adapters[1], None]
    wanted = tokens(ask(engine, asks, chosen))
    demand = Demand(216, 16)
    seconds = Admission(engine.runner.planner).seconds_of(demand, 216)
    before = engine.scheduler.long_steps
    engine.cut_steps(2 * seconds / 10)
    try:
        assert tokens(ask(engine, asks, chosen)) == wanted
    finally:
        engine.scheduler.long_steps = before
    assert any(isinstance(guest, LongStepRunner) for guest in engine.runner.guests)
    assert engine.is_idle()


@pytest.mark.parametrize("seed", range(3))
def test_requests_arrive_and_leave_at_random(seed: int, mixed: tuple[Engine, list[Any]]) -> None:
    engine, adapters = mixed
    generator = random.Random(seed)
    caches = ("none", "prefix", "dual", "frozen")
    asks = [
        Request(
            random_prompt(generator.randrange(5, 60), seed=n),
            {**SHORT, "cache": generator.choice(caches), "seed": n},
        )
        for n in range(15)
    ]
    chosen = [generator.choice([None, *adapters]) for _ in asks]
    alone = [
        ask(engine, [one], adapter)[0].token_ids for one, adapter in zip(asks, chosen, strict=True)
    ]
    answers, num_begun = dict[str, Response](), 0
    while num_begun < len(asks) or engine.llm.llm_engine.has_unfinished_requests():
        if num_begun < len(asks) and generator.random() < 0.5:
            one = asks[num_begun]
            engine.llm.llm_engine.add_request(
                str(num_begun),
                {"prompt_token_ids": one.prompt},
                sampling_params(one),
                lora_request=chosen[num_begun],
            )
            num_begun += 1
        answers |= step(engine)
    assert [answers[str(n)].token_ids for n in range(len(asks))] == alone
    assert engine.is_idle()


@pytest.mark.parametrize("quantization", ["int4", "nf4", "fp8"])
def test_quantised_bases_take_adapters(
    quantization: str, checkpoint: Callable[[str], Path], adapter_of: Any, tmp_path: Path
) -> None:
    """Other rows get exactly the answers of a quantised engine without adapters."""
    folder = checkpoint("mha")
    path = adapter_of(folder, rank=8, gain=1.0)
    zeros = random_adapter(folder)
    zeros = {k: t * 0 if "lora_B" in k else t for k, t in zeros.items()}
    nothing = save_adapter(tmp_path / "zeros", zeros)
    asks = [Request(random_prompt(20), SHORT)]
    with running(folder, quantization=quantization) as engine:
        plain = tokens(ask(engine, asks))
    with running(folder, quantization=quantization, enable_lora=True) as engine:
        assert tokens(ask(engine, asks)) == plain
        assert tokens(ask(engine, asks, lora_request("zeros", 1, nothing))) == plain
        assert tokens(ask(engine, asks, lora_request("a", 2, path))) != plain


FP8_CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "all": ("mha", lambda _: True, {}),
    "gate and up": ("mha", named("ff_proj", "up_proj"), {}),
    "down": ("mha", named("ff_out"), {}),
    "experts": ("llada2", lambda _: True, {}),
    "attention in fp8": (
        "mha",
        named("attn_out"),
        {"additional_config": {"dllm": {"attention_dtype": "fp8", "fp8_attention_min_tokens": 1}}},
    ),
}


@pytest.mark.parametrize(("family", "modules", "options"), FP8_CASES.values(), ids=FP8_CASES)
def test_fp8_weights(
    family: str,
    modules: Any,
    options: dict[str, Any],
    checkpoint: Callable[[str], Path],
    adapter_of: Any,
    tmp_path: Path,
) -> None:
    """Adapters multiply rows that are not quantised, so errors are those of the other products."""
    folder, prompt = checkpoint(family), random_prompt(20, seed=2)
    path = adapter_of(folder, modules=modules, gain=1.0)
    merged = merge(folder, path, tmp_path / "merged")
    with running(merged) as engine:
        exact = scores_of(engine, prompt, None)
    with running(merged, quantization="fp8", **options) as engine:
        rounded = scores_of(engine, prompt, None)
    with running(folder, quantization="fp8", **options) as engine:
        plain = scores_of(engine, prompt, None)
    with running(folder, quantization="fp8", enable_lora=True, **options) as engine:
        assert torch.equal(scores_of(engine, prompt, None), plain)
        scores = scores_of(engine, prompt, lora_request("a", 1, path))
    assert (scores - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()
    assert (plain - exact).abs().mean() > 2 * (scores - exact).abs().mean()


def test_slots_without_room_are_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of rank 512 takes 6.6 MiB here, and the pool keeps its configured bytes."""
    room = 20 << 20
    machine = SimpleNamespace(total=POOL_BYTES + room, available=POOL_BYTES + room)
    monkeypatch.setattr(pool_budget.psutil, "virtual_memory", lambda: machine)
    wanted = "max_loras: given 4 of rank 512, [0-9.]+ MiB; wanted at most 3"
    wrong = pytest.raises(ServerConfigError, match=wanted)
    options = {"enable_lora": True, "max_lora_rank": 512, "gpu_memory_utilization": 1.0}
    with wrong, running(checkpoint("gqa"), max_loras=4, **options):
        pass
    with running(checkpoint("gqa"), max_loras=3, **options) as engine:
        assert engine.runner.adapters.take_report().slot_bytes < room // 3


@pytest.mark.parametrize(
    ("num_requested", "wanted"),
    [
        (0, "draft_adapter: given 1 of rank 128, "),
        (2, "max_loras: given 3 .* with the one for drafts"),
    ],
)
def test_the_slot_of_a_draft_adapter_needs_room(
    num_requested: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(total=POOL_BYTES, available=POOL_BYTES)
    monkeypatch.setattr(pool_budget.psutil, "virtual_memory", lambda: machine)
    matrices: Any = None  # only the bytes of a slot count
    sizes = SlotSizes(matrices, num_requested, 128, DraftAdapter("folder"))
    with pytest.raises(ServerConfigError, match=wanted):
        pool_budget.check_slots(sizes, 1 << 30, torch.device("cpu"), 1.0)


FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"lora_dtype": "float16"},
        "lora_dtype: given float16; wanted auto: adapters have the model's dtype",
    ),
    "moe": (
        {"enable_moe_shared_loras": True},
        "enable_moe_shared_loras: given true; wanted false: experts take no adapters",
    ),
    "tower": (
        {"enable_tower_connector_lora": True},
        "enable_tower_connector_lora: given true; wanted none: there is neither tower nor",
    ),
    "targets": (
        {"lora_target_modules": ["o_proj"]},
        "lora_target_modules: given 'o_proj'; wanted some of q_proj, k_proj, v_proj, attn_out, "
        "ff_proj, up_proj, ff_out",
    ),
}


@pytest.mark.parametrize(("flags", "line"), FLAGS.values(), ids=FLAGS)
def test_flags(flags: dict[str, Any], line: str, checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises((ServerConfigError, ValueError), match=re.escape(line)):
        engine_config(checkpoint("mha"), enable_lora=True, **flags)

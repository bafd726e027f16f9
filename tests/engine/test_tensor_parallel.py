# SPDX-License-Identifier: Apache-2.0
"""Ranks in separate processes, on the CPU with gloo, decode the tokens of one process.

All of these tests are in one file, because ranks of two tests at once would wait for each other.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference

from tests.adapter_files import lora_request, random_adapter, save_adapter
from tests.checkpoints import make_checkpoint, random_prompt
from tests.engine.cases import SHORT, mixed_asks, whole_asks
from tests.engine.harness import (
    NOISY,
    Engine,
    Request,
    as_request,
    assert_decoded,
    clear_case,
    clear_cases,
    refusal_error,
    running,
    sampling_params,
    shrink,
    speculating,
    start,
    to_answer,
    tokens,
)
from tests.engine.ranks import fail_once
from tests.engine.same_bits import INVARIANT, check_beside, check_drafts, requests

TWO_BLOCKS: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8}
REQUESTS: list[tuple[int, dict[str, Any]]] = [
    (20, TWO_BLOCKS),
    (7, {**TWO_BLOCKS, "cfg_scale": 1.0}),
    (12, {"gen_length": 16, "block_length": 8, "threshold": 0.6}),
    (20, {**NOISY, "temperature": 0.8}),
    (5, {**NOISY, "remasking": "random"}),
    (9, {**TWO_BLOCKS, "confidence_eos_eot_inf": True}),
    (33, {**TWO_BLOCKS, "logits_eos_inf": True, "confidence_dtype": "float64"}),
]


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
SHAPED = [
    Request(random_prompt(9), {**NOISY, "temperature": 0.8, "top_p": 0.8, "min_p": 0.01}),
    Request(random_prompt(11), {**TWO_BLOCKS, **PENALTIES, "logit_bias": {"250": 2.0, "7": -5.0}}),
    Request(
        random_prompt(7), {**TWO_BLOCKS, "min_tokens": 12, "allowed_token_ids": [1, 7, 160, 250]}
    ),
    Request(
        random_prompt(8), {**NOISY, **PENALTIES, "temperature": 0.8, "cfg_scale": 0.5, "top_k": 9}
    ),
]

POOL_BYTES = 110_000


def shrink_rank(worker: Any) -> None:
    shrink(worker.worker.model_runner, POOL_BYTES)


def break_rule(worker: Any) -> None:
    """Make requests with 12 prompt tokens fail after their first block on this rank."""
    from vllm.diffusion.decoding.threshold import Threshold

    prepare = Threshold.prepare

    def fail(self: Any, tokens: Any) -> Any:
        if self.prompt_length == 12 and self.block == 1:
            raise RuntimeError("the rule broke")
        return prepare(self, tokens)

    Threshold.prepare = fail  # type: ignore[method-assign]  # the process ends with the test


def test_two_ranks_equal_the_reference(tmp_path: Path) -> None:
    """Two ranks that split heads, vocabulary and noise give the reference's tokens.

    Requests run in a batch, after a refusal, alone, and in chunks. In a small pool both ranks must
    cut steps into the same chunks. A rule that fails on both ranks ends its own request. Steps in
    slices stop after the same chunk on both ranks. If one rank fails, the requests of that step
    end, and both ranks continue.

    300 logit columns are no multiple of upstream's padding, so that the second rank has columns
    that belong to no token.
    """
    folder = make_checkpoint(tmp_path, seed=10, n_kv_heads=2, embedding_size=300)
    model = load_reference(folder)
    asks, wanted = clear_cases(model, REQUESTS)
    with running(folder) as engine:
        shaped = [answer.token_ids for answer in engine.ask(*SHAPED)]
    with running(folder, tensor_parallel_size=2) as engine:
        assert [answer.token_ids for answer in engine.ask(*SHAPED)] == shaped
        whole = engine.ask(*asks)
        assert_decoded(whole, wanted)
        with pytest.raises(refusal_error(), match="gen_length"):
            engine.ask(Request(asks[0].prompt, {"gen_length": 300}))
        assert_decoded(engine.ask(asks[3]), wanted[3:4])
        drafted = engine.ask(*speculating(asks, 3))
        assert_decoded(drafted, wanted)
        assert any(answer.report["states_accepted"] for answer in drafted)
        engine.llm.collective_rpc(shrink_rank)
        chunked = engine.ask(*asks)
        assert_decoded(chunked, wanted)
        peaks = [max(a.report["peak_bytes"] for a in answers) for answers in (chunked, whole)]
        assert peaks[0] <= POOL_BYTES < peaks[1]
        engine.cut_steps(1.2e-4)  # seconds: less than any step, more than any chunk
        assert_decoded(engine.ask(*asks), wanted)
        engine.cut_steps(math.inf)
        few, wanted = asks[2:5], wanted[2:5]
        engine.llm.collective_rpc(fail_once, args=("other",))
        broken = engine.ask(*few)
        assert ["RankError" in answer.report["error"] for answer in broken] == [True] * len(few)
        engine.llm.collective_rpc(fail_once, args=("memory",))
        # After a failed step, all ranks repeat it without drafts.
        assert_decoded(engine.ask(*speculating(few, 2)), wanted)
        engine.llm.collective_rpc(break_rule)
        first, *others = engine.ask(*few)
        assert "the rule broke" in first.report["error"]
        assert_decoded(others, wanted[1:])


def run_ahead(worker: Any) -> None:
    worker.worker.loop.runs_ahead = True


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llada", {"n_kv_heads": 2, "embedding_size": 300}),
        ("sdar", {"num_key_value_heads": 1}),  # both ranks have this head
        ("llada2", {"first_k_dense_replace": 2, "num_shared_experts": 2}),
        # Wide enough that the first matrices of adapters are appended to weights.
        ("llada", {"d_model": 512, "mlp_hidden_size": 512, "n_layers": 2}),
    ],
)
def test_two_ranks_divide_adapters(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base", family=family, seed=10, **overrides)
    paths = [
        save_adapter(tmp_path / str(n), random_adapter(folder, seed=n, gain=0.5)) for n in range(2)
    ]
    chosen = [lora_request("a", 1, paths[0]), None, lora_request("b", 2, paths[1])]
    asks = [Request(random_prompt(length), {**TWO_BLOCKS, "seed": 7}) for length in (20, 9, 33)]
    prompts: list[Any] = [{"prompt_token_ids": ask.prompt} for ask in asks]

    def answers(engine: Engine) -> list[list[int]]:
        outputs = engine.llm.generate(
            prompts,
            [sampling_params(ask) for ask in asks],
            use_tqdm=False,
            lora_request=chosen,
        )
        return [to_answer(output).token_ids for output in outputs]

    with running(folder, enable_lora=True, max_loras=2) as engine:
        wanted = answers(engine)
    with running(folder, enable_lora=True, max_loras=2, tensor_parallel_size=2) as engine:
        assert answers(engine) == wanted
        calls = engine.llm.llm_engine
        with pytest.raises(Exception, match="lora_path: given"):
            calls.add_lora(lora_request("c", 3, "/nowhere"))
        assert sorted(calls.list_loras()) == [1, 2]
        save_adapter(paths[0], random_adapter(folder, seed=1, gain=0.5))
        assert calls.add_lora(lora_request("a", 1, paths[0], load_inplace=True))
        chosen[2] = chosen[0]
        changed = answers(engine)
        assert changed[2] == wanted[2]
        assert changed[0] != wanted[0]


def test_ranks_take_the_same_turns(tmp_path: Path) -> None:
    """Each rank chooses on its own which requests take part in a step launched ahead."""
    folder = make_checkpoint(tmp_path, seed=10, n_kv_heads=2, embedding_size=300)
    model = load_reference(folder)
    prompt, wanted = clear_case(model, 20, **TWO_BLOCKS)
    whole = as_request(prompt, **TWO_BLOCKS)
    caches = ["dual", "frozen"] * 2
    kept = [as_request([*prompt, i + 2], cache=c, **TWO_BLOCKS) for i, c in enumerate(caches)]
    guided = {**TWO_BLOCKS, "cache": "frozen", "cfg_scale": 1.0}
    own, frozen = clear_case(model, 40, **guided)
    with running(folder, tensor_parallel_size=2, max_num_batched_tokens=120) as engine:
        assert_decoded(engine.ask(as_request(own, **guided)), [frozen])
        alone = [engine.ask(ask)[0].token_ids for ask in kept]
        for _ in range(2):
            *cached, last = engine.ask(*speculating([*kept, whole], 2))
            assert [answer.token_ids for answer in cached] == alone
            assert_decoded([last], [wanted])
            engine.llm.collective_rpc(run_ahead)


@pytest.mark.parametrize("family", ["mha", "sdar"])
def test_ranks_give_the_same_bits_beside_others(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    asks, others = (
        requests(3, range(5, 200), most_prompt=40, seed=seed, family=family) for seed in (1, 2)
    )
    settings = {"max_num_seqs": 16, "additional_config": INVARIANT}
    with running(checkpoint(family), tensor_parallel_size=2, **settings) as engine:
        alone = check_beside(engine, asks, others, (5,))
        check_drafts(engine, asks, alone)


def test_gpus_equal_the_reference(num_gpus: int, tmp_path: Path) -> None:
    """GPUs sum in kernels, in which the other ranks wait if one rank fails."""
    folder = make_checkpoint(tmp_path, seed=10, n_kv_heads=2, embedding_size=300)
    model = load_reference(folder)
    asks, wanted = clear_cases(model, REQUESTS)
    with running(folder, tensor_parallel_size=num_gpus) as engine:
        assert_decoded(engine.ask(*asks), wanted)
        engine.llm.collective_rpc(fail_once, args=("other",))
        broken = engine.ask(*asks)
        assert any("RankError" in answer.report.get("error", "") for answer in broken)
        assert_decoded(engine.ask(*asks), wanted)


# These positions are scored in one forward pass of 64 rows, which runs as a graph.
READ = list(range(0, 64, 5))
SCORED = Request(
    random_prompt(64, 9),
    {"score": {"positions": READ, "token_ids": [[5, 6, 7, 8]] * len(READ)}},
    {"max_tokens": 1},
)
WIDE: dict[str, dict[str, Any]] = {
    "llada": {"d_model": 512, "mlp_hidden_size": 768},
    "moe": {"hidden_size": 512, "expert_intermediate_size": 256},
}


def scores(folder: Path, **settings: Any) -> torch.Tensor:
    """Return the log probabilities of some tokens in one forward pass."""
    with running(folder, dtype="bfloat16", **settings) as engine:
        (answer,) = engine.ask(SCORED)
        return torch.tensor(answer.report["scores"]["logprobs"])


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("llada", None), ("llada", "int4"), ("moe", None), ("moe", "fp8")],
)
def test_gpus_score_as_well_as_one(
    family: str, quantization: str | None, num_gpus: int, tmp_path: Path
) -> None:
    """Ranks with weights in bf16 or quantised are as close to plain weights as one GPU.

    Each rank quantises its own columns.
    """
    folder = make_checkpoint(tmp_path, family=family, seed=9, gain=1.0, **WIDE[family])
    plain = scores(folder)
    one = plain if quantization is None else scores(folder, quantization=quantization)
    several = scores(folder, quantization=quantization, tensor_parallel_size=num_gpus)
    error = (one - plain).norm() if quantization else 0.02 * plain.norm()
    assert 0 < (several - plain).norm() < 1.5 * error


# ---- rows divided over processes ----


def dividing(size: int) -> dict[str, Any]:
    """Return settings of an engine that divides long steps over `size` ranks."""
    divided = {"sequence_parallel_size": size, "sequence_parallel_min_tokens": 100}
    return {"additional_config": {"dllm": {"longest_pause_ms": 0, **divided}}}


def processes_equal_one(folder: Path, ranks: dict[str, Any], *errors: str) -> None:
    """Check that ranks decode the tokens of one process in all ways of running.

    Steps are divided, undivided, cached and in slices, and follow an abort and errors. If one rank
    fails in a divided step, the requests of that step end. Finally, the weights of another
    checkpoint are loaded in place, and every rank receives them from its own folder. If one rank
    cannot load them, no rank uses them.
    """
    root = folder.parent / f"{folder.name}-others"
    dllm = {**ranks["additional_config"]["dllm"], "weight_update_root": str(root)}
    num_ranks = dllm["sequence_parallel_size"] * ranks.get("tensor_parallel_size", 1)
    others = [make_checkpoint(root / str(rank), seed=64) for rank in range(num_ranks)]
    ranks = {**ranks, "additional_config": {"dllm": dllm}}
    ranks["weight_transfer_config"] = {"backend": "disk"}
    long = Request(random_prompt(150, 1), {**SHORT, "cfg_scale": 1.0})
    with running(folder) as engine:
        wanted, whole = tokens(engine.ask(long, *mixed_asks())), tokens(engine.ask(*whole_asks()))
    with running(folder, **ranks) as engine:
        checksums = engine.llm.collective_rpc("compute_weight_checksums")
        assert len(set().union(*checksums)) == sum(map(len, checksums))  # all names differ
        assert tokens(engine.ask(*whole_asks())) == whole
        assert tokens(engine.ask(long, *mixed_asks())) == wanted
        engine.cut_steps(8e-3)
        start(engine, "gone", long)
        for _ in range(3):
            engine.llm.llm_engine.step()
        engine.llm.llm_engine.abort_request(["gone"])
        assert tokens(engine.ask(long, *mixed_asks())) == wanted
        engine.cut_steps(math.inf)
        for error in errors:
            engine.llm.collective_rpc(fail_once, args=(error,))
            (answer,) = engine.ask(long)
            assert ("RankError" in answer.report.get("error", "")) == (error == "other")
            assert error == "other" or tokens([answer]) == wanted[:1]
        assert tokens(engine.ask(*whole_asks())) == whole
        paths = [{"path": str(rank)} for rank in range(num_ranks)]
        engine.llm.start_weight_update()
        with pytest.raises(Exception, match=r"path|rank failed"):
            engine.llm.update_weights({"update_info": [*paths[:-1], {"path": "missing"}]})
        engine.llm.start_weight_update()  # the failed update has ended on all ranks
        engine.llm.update_weights({"update_info": paths})
        engine.llm.finish_weight_update()
        changed = tokens(engine.ask(*whole_asks()))
    with running(others[0]) as engine:
        assert changed == tokens(engine.ask(*whole_asks())) != whole


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_divided_rows_equal_one_process(
    tensor_size: int, checkpoint: Callable[[str], Path]
) -> None:
    """Rows are divided over two processes, or over two pairs that split the weights."""
    ranks = {**dividing(2), "tensor_parallel_size": tensor_size}
    processes_equal_one(checkpoint("mha"), ranks, "other", "memory")


def test_divided_rows_keep_their_adapters(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("gqa")
    paths = [
        save_adapter(tmp_path / str(n), random_adapter(folder, seed=n, gain=0.5)) for n in range(2)
    ]
    asks = [one for one in whole_asks() for _ in range(3)]
    adapters = [lora_request("a", 1, paths[0]), None, lora_request("b", 2, paths[1])]

    def answers(engine: Engine) -> list[list[int]]:
        outputs = engine.llm.generate(
            [{"prompt_token_ids": ask.prompt} for ask in asks],
            [sampling_params(ask) for ask in asks],
            use_tqdm=False,
            lora_request=adapters * (len(asks) // 3),
        )
        return [to_answer(output).token_ids for output in outputs]

    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    with running(folder, **options) as engine:
        wanted = answers(engine)
    with running(folder, **options, **dividing(2)) as engine:
        assert answers(engine) == wanted


def test_rows_divided_over_gpus_equal_one(num_gpus: int, checkpoint: Callable[[str], Path]) -> None:
    """Undivided steps run as graphs, and divided steps follow them at once."""
    processes_equal_one(checkpoint("mha"), dividing(num_gpus))

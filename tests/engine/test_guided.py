# SPDX-License-Identifier: Apache-2.0
"""Answers match their format under every rule that commits tokens."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.checkpoints import EOS_ID, EOT_ID, MASK_ID, random_prompt
from tests.engine.cases import GUIDED, GUIDED_RULES, SCHEMA, guided_asks
from tests.engine.harness import Engine, Request, record, refusal_error, running
from vllm.diffusion.guided.language import Language
from vllm.diffusion.memory.plan import ChunkRows, Plan, Residency

CHECK = Draft202012Validator(SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_match_their_schema(engine: Engine, temperature: float) -> None:
    """Answers of every rule and cache match the schema, and all of them share steps."""
    for ask, answer in zip(
        actual := guided_asks(GUIDED_RULES, temperature, json=SCHEMA),
        engine.ask(*actual),
        strict=True,
    ):
        assert answer.finish_reason in ("stop", "length"), (ask, answer.report)
        CHECK.validate(json.loads(answer.text))


def test_answers_match_a_regex_and_a_choice(engine: Engine) -> None:
    pattern, choice = r"[a-z]{3,8}(, [a-z]+)*!", ["Yes, sir", "no", "maybe so"]
    rules = ("semi_ar", "dual cache", "several blocks", "dream")
    for answer in engine.ask(*guided_asks(rules, 1.0, regex=pattern)):
        assert re.fullmatch(pattern, answer.text)
    for answer in engine.ask(*guided_asks(rules, 1.0, choice=choice)):
        assert answer.text in choice


def test_any_json_object_may_be_asked_for(engine: Engine) -> None:
    for answer in engine.ask(*guided_asks(("semi_ar", "threshold"), 0.7, 3, json_object=True)):
        assert isinstance(json.loads(answer.text), dict)


def test_upstreams_own_field_is_taken(engine: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    structured = StructuredOutputsParams(json=json.dumps(SCHEMA))
    ask = Request(random_prompt(9), {**GUIDED, "steps": 16}, {"structured_outputs": structured})
    (answer,) = engine.ask(ask)
    (other,) = engine.ask(*guided_asks(["semi_ar"], 0.0, json=SCHEMA))
    assert answer.token_ids == other.token_ids
    CHECK.validate(json.loads(answer.text))


def test_an_answer_may_be_cut_before_its_canvas_ends_and_is_whole(engine: Engine) -> None:
    """`max_tokens` bounds the answer, which is complete before its canvas ends."""
    for seed in range(3):
        extra = {**GUIDED, "steps": 16, "temperature": 1.5, "seed": seed}
        extra |= {"max_tokens": 30, "structured_outputs": {"json": SCHEMA}}
        (answer,) = engine.ask(Request(random_prompt(9, seed), extra))
        assert len(answer.token_ids) <= 30
        CHECK.validate(json.loads(answer.text))


def test_beside_others_an_answer_is_as_alone(engine: Engine) -> None:
    actual = guided_asks(("semi_ar", "threshold", "dream"), 0.7, 2, json=SCHEMA)
    alone = [engine.ask(ask)[0].token_ids for ask in actual]
    others = [Request(random_prompt(12), {**GUIDED, "steps": 16, "temperature": 1.0, "seed": 3})]
    free = engine.ask(*others)[0].token_ids
    together = [answer.token_ids for answer in engine.ask(*actual, *others)]
    assert together == [*alone, free]


@pytest.mark.parametrize("head_groups", [1, 2])
def test_steps_in_chunks_and_in_groups_of_heads_choose_the_same(
    engine: Engine, head_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = guided_asks(("semi_ar", "threshold"), 0.7, json=SCHEMA)
    whole = [answer.token_ids for answer in engine.ask(*actual)]
    plan = Plan(Residency(False, head_groups), ChunkRows(37, 29, 23, 5))
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    assert [answer.token_ids for answer in engine.ask(*actual)] == whole


def test_the_forced_beginning_costs_no_forward(engine: Engine) -> None:
    """Two thirds of a short answer are literals, so that steps only decide the rest."""
    schema = {
        "type": "object",
        "properties": {"a very long name of a property": {"type": "boolean"}},
        "required": ["a very long name of a property"],
    }
    extra = {"gen_length": 32, "block_length": 32, "threshold": 1.0}
    (answer,) = engine.ask(
        Request(random_prompt(9), {**extra, "structured_outputs": {"json": schema}})
    )
    assert isinstance(json.loads(answer.text)["a very long name of a property"], bool)
    assert answer.num_forwards is not None
    assert answer.num_forwards <= 32 - 18


def test_an_answer_stands_between_prompt_and_suffix(engine: Engine) -> None:
    """Rules and caches fill the gap before a suffix, with and without a format."""
    pattern, actual = "[a-z]{3,8}( [a-z]+)*", []
    for rule in GUIDED_RULES:
        (ask,) = guided_asks([rule], 0.7, regex=pattern)
        room = {"max_tokens": 21, "gen_length": 32}
        actual.append(Request(ask.prompt, {**ask.extra, **room, "suffix_ids": random_prompt(7)}))
    for ask, answer in zip(actual, engine.ask(*actual), strict=True):
        assert len(answer.token_ids) <= 21
        assert re.fullmatch(pattern, answer.text), (ask, answer)
    free = {**GUIDED, "max_tokens": 20, "steps": 16}
    texts = {
        tuple(engine.ask(Request(random_prompt(9), {**free, **own}))[0].token_ids)
        for own in ({}, {"suffix_ids": random_prompt(7)}, {"suffix_ids": random_prompt(7, 1)})
    }
    assert len(texts) == 3
    whole = {**free, "ignore_eos": True, "suffix_ids": random_prompt(40)}
    report = engine.ask(Request(random_prompt(9), whole))[0].report
    assert (report["num_committed"], report["num_forwards_saved"]) == (20, 0)


def test_every_gap_of_a_prompt_is_in_the_language(engine: Engine) -> None:
    """Every gap and the canvas match the format, each of them on its own."""
    head, middle = random_prompt(5), random_prompt(4, 1)
    prompt = [*head, *[MASK_ID] * 4, *middle, *[MASK_ID] * 9, *middle]
    pattern = "[a-z]{2,9}!?"
    extra = {"structured_outputs": {"regex": pattern}, "allow_infill": True, "temperature": 1.0}
    rules = ("semi_ar", "threshold", "several blocks", "dream", "guidance")
    actual = [
        Request(prompt, {**guided_asks([rule], 1.0)[0].extra, **extra, "seed": 5}) for rule in rules
    ]
    for answer in engine.ask(*actual):
        filled = answer.report["infilled"]
        for gap in (range(5, 9), range(13, 22)):
            ids = [filled[place] for place in gap]
            text = engine.llm.get_tokenizer().decode([i for i in ids if i not in (EOS_ID, EOT_ID)])
            assert re.fullmatch(pattern, text), (answer, text)
        assert re.fullmatch(pattern, answer.text)
    short = Request(
        [*head, MASK_ID, *middle], {**GUIDED, **extra, "structured_outputs": {"regex": "日"}}
    )
    with pytest.raises(refusal_error(), match=r"structured_outputs\.regex"):
        engine.ask(short)
    short.extra["structured_outputs"] = {"json": SCHEMA}
    with pytest.raises(refusal_error(), match=r"prompt: given 1; the shortest answer of .* has"):
        engine.ask(short)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"suffix_ids": [MASK_ID]}, "suffix_ids: .* without the mask token"),
        ({"suffix_ids": [5] * 200}, "suffix_ids: .* exceed max_model_len"),
        ({"gen_length": 8}, r"gen_length: given 8; the shortest answer of .* has \d+ tokens"),
        (
            {"gen_length": 32, "max_tokens": 5},
            r"max_tokens: given 5; the shortest answer of structured_outputs.json has \d+ tokens",
        ),
        ({"logits_eos_inf": True}, "logits_eos_inf"),
        ({"structured_outputs": {"json": {"not": {}}}}, r"structured_outputs.json: .*not"),
        ({"structured_outputs": {"regex": "日"}}, "no tokens of the model spell it"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar"),
        (
            {"canvas_token_ids": [5] * 64, "pinned": [[0, 2], [9, 12]]},
            r"pinned: given 'tokens 0 to 1'; wanted tokens of the text that structured_outputs",
        ),
        (
            {"canvas_token_ids": [5] * 64, "max_edits": 2},
            r"max_edits: given 2; wanted at least \d+, the number of tokens that break",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(engine: Engine, extra: Any, message: str) -> None:
    parameters = {"gen_length": 64, "structured_outputs": {"json": SCHEMA}, **extra}
    with pytest.raises(refusal_error(), match=message):
        engine.ask(Request(random_prompt(9), parameters))
    assert engine.is_idle()


def damaged(
    token_ids: Sequence[int], generator: random.Random
) -> tuple[list[int], list[list[int]]]:
    """Return tokens with three random ones replaced, and ranges of every second other token."""
    text = list(token_ids)
    broken = sorted(generator.sample(range(len(text)), 3))
    for at in broken:
        text[at] = generator.choice([97, 98, 99])
    return text, [[at, at + 1] for at in range(len(text)) if at not in broken][::2]


def assert_repaired(engine: Engine, asks: Sequence[Request], limits: Sequence[int]) -> None:
    """Check that answers match the schema with few changes, and that pinned tokens stay."""
    for ask, answer, limit in zip(asks, engine.ask(*asks), limits, strict=True):
        CHECK.validate(json.loads(answer.text))
        assert answer.report["num_edited"] <= limit
        for start, stop in ask.extra["pinned"]:
            given = ask.extra["canvas_token_ids"][start:stop]
            assert answer.token_ids[start:stop] in (given, [])


def test_a_text_is_repaired_until_it_matches(engine: Engine) -> None:
    """As few tokens change as were broken, and pinned ones stay; also if others are scored."""
    generator = random.Random(4)
    whole = engine.ask(*guided_asks(["semi_ar"], 1.0, 6, json=SCHEMA))
    asks, limits = [], []
    for answer in whole:
        for scores in ({"noise": 0}, {"noise": 0.3, "algorithm": "threshold"}):
            text, pins = damaged(answer.token_ids, generator)
            extra = {"canvas_token_ids": text, "pinned": pins, "gen_length": 64, **scores}
            asks.append(
                Request(random_prompt(9), {**extra, "structured_outputs": {"json": SCHEMA}})
            )
            limits.append(3 if scores["noise"] == 0 else len(text))
    assert_repaired(engine, asks, limits)


def test_texts_with_the_same_format_share_its_language(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = record(monkeypatch, Language, "unpacked", lambda language, _: language)
    fields = {"gen_length": 16, "structured_outputs": {"regex": "a{3,5}share"}}
    text = {"canvas_token_ids": [97, 97, 97, 98], "noise": 0}
    answers = engine.ask(*[Request(random_prompt(9, n), {**fields, **text}) for n in range(3)])
    assert all("share" in answer.text for answer in answers)
    assert len(unpacked) == 1


def test_a_text_that_matches_needs_no_forward(engine: Engine) -> None:
    (whole,) = engine.ask(*guided_asks(["semi_ar"], 0.0, json=SCHEMA))
    extra = {"canvas_token_ids": whole.token_ids, "noise": 0}
    extra["structured_outputs"] = {"json": SCHEMA}
    (answer,) = engine.ask(Request(random_prompt(9), extra))
    assert answer.token_ids == whole.token_ids
    assert (answer.report["num_edited"], answer.report["num_remasked"]) == (0, 0)


def test_log_probabilities_of_chosen_tokens_are_known(engine: Engine) -> None:
    (ask,) = guided_asks(["semi_ar"], 0.0, json=SCHEMA)
    (output,) = engine.outputs(Request(ask.prompt, ask.extra, {"logprobs": 1}))
    completion = output.outputs[0]
    actual = [p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert len(actual) > 8
    assert all(value <= 0 for value in actual), actual  # also fails for NaN


# Rules of block-causal families. "edits" may replace tokens that it has committed.
BLOCK_RULES: dict[str, dict[str, dict[str, Any]]] = {
    "llada2": {
        "edits": {"algorithm": "joint_threshold", "editing_threshold": 0.1, "threshold": 0.3},
        "edits at random": {"algorithm": "joint_threshold", "penalty_lambda": 0.5},
    },
    "sdar": {
        name: {"algorithm": name}
        for name in ("low_confidence_dynamic", "semi_ar", "sequential", "entropy_bounded")
    },
    "fast_dllm": {
        "threshold": {"sub_block_length": 4},
        "nothing kept": {"cache": "none"},
        "hierarchy_block": {"algorithm": "hierarchy_block"},
    },
}


@pytest.mark.parametrize("case", BLOCK_RULES)
def test_block_causal_families_answer_in_the_language(
    checkpoint: Callable[[str], Path], case: str
) -> None:
    with running(checkpoint(case)) as engine:
        shared = {"gen_length": 60, "block_length": 8, "structured_outputs": {"json": SCHEMA}}
        actual = [
            Request(random_prompt(9, seed), {**shared, **rule, "temperature": t, "seed": seed})
            for rule in BLOCK_RULES[case].values()
            for seed, t in enumerate((0.0, 1.5))
        ]
        for ask, answer in zip(actual, engine.ask(*actual), strict=True):
            assert answer.finish_reason in ("stop", "length"), (ask, answer.report)
            CHECK.validate(json.loads(answer.text))


@pytest.mark.parametrize("case", ["mha", "llada22"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_texts_match_whatever_is_masked_again(
    checkpoint: Callable[[str], Path], case: str, rounds: int
) -> None:
    """A step scores only one copy of the text, and reports log probabilities."""
    shared = {"algorithm": "semi_ar", "block_length": 8, "gen_length": 64, "noise": 0.5}
    shared |= {"structured_outputs": {"json": SCHEMA}, "edit_rounds": rounds}
    asks = [
        Request(
            random_prompt(9, seed),
            {**shared, "canvas_token_ids": random_prompt(40, seed)},
            {"logprobs": 1},
        )
        for seed in range(3)
    ]
    with running(checkpoint(case), max_num_batched_tokens=64) as engine:
        for answer in engine.ask(*asks):
            CHECK.validate(json.loads(answer.text))


@pytest.mark.parametrize("case", ["llada2", "sdar"])
def test_block_causal_families_repair_texts(checkpoint: Callable[[str], Path], case: str) -> None:
    """As few tokens change as were broken, and pinned ones stay; also if others are scored."""
    generator = random.Random(4)
    with running(checkpoint(case)) as engine:
        shared = {"block_length": 8, "gen_length": 60, "structured_outputs": {"json": SCHEMA}}
        shared["algorithm"] = "semi_ar"
        wholes = engine.ask(
            *(Request(random_prompt(9, seed), {**shared, "seed": seed}) for seed in range(4))
        )
        asks, limits = [], []
        for number, whole in enumerate(wholes):
            text, pins = damaged(whole.token_ids, generator)
            noise = 0.3 * (number % 2)
            extra = {**shared, "canvas_token_ids": text, "pinned": pins, "noise": noise}
            asks.append(Request(random_prompt(9), extra))
            limits.append(len(text) if noise else 3)
        assert_repaired(engine, asks, limits)

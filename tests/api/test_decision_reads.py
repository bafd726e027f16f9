# SPDX-License-Identifier: Apache-2.0
"""Orders, calibration, refusals and labels of decisions, without an engine."""

import asyncio
import json
import math
import random
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.openai.decisions.question_types import (
    Question,
    build_question,
)
from vllm.entrypoints.openai.decisions.strategies import QuestionRead

from tests.programs import ROOT
from tests.stub_server import Stub
from vllm.diffusion.api.decisions.calibration import (
    KindCalibration,
    calibration_error,
    fit_temperature,
    load,
)
from vllm.diffusion.api.decisions.serving import DecisionsHandler
from vllm.diffusion.api.likelihood.sheets import Labels, Place, sheet_of
from vllm.diffusion.api.likelihood.typed_decisions import Reading, ReadOptions
from vllm.diffusion.config import Settings
from vllm.diffusion.core.errors import ServerConfigError

PLANTED = 2.5
BIAS = 4.0  # weight of the first option that is shown
WEIGHTS = {'"a"': 1.0, '"b"': 3.0, '"c"': 2.0, '"d"': 0.5}
SCRIPT = ROOT / "scripts" / "calibrate_decisions.py"


class Biased:
    """A strategy whose model prefers the first option that it is shown."""

    max_passes = 2
    mask_token = "<mask>"
    options = ReadOptions()

    async def read_orders(
        self, orders: Sequence[Sequence[Question]], *_: Any, **__: Any
    ) -> Reading:
        reads = [[self.read(question) for question in questions] for questions in orders]
        return Reading(reads, len(orders), len(orders), 10, 0, frozenset({"short"}))

    def read(self, question: Question) -> QuestionRead:
        weights = [WEIGHTS.get(option.name, 1.0) for option in question.options]
        weights[0] *= BIAS
        total = sum(weights)
        return QuestionRead([weight / total for weight in weights], 0.5, True, 10, 0)


def decide(settings: Settings | None = None, **body: Any) -> dict[str, Any]:
    strategy: Any = Biased()
    handler = DecisionsHandler(strategy, ["m"], settings or Settings(), None)
    return asyncio.run(handler.answer({"input": "x", **body}, "1"))


def choice(*values: str) -> dict[str, Any]:
    choices = [{"value": value} for value in values]
    return {"type": "choice", "instructions": "x", "choices": choices}


def test_a_bias_for_the_first_option_cancels_out() -> None:
    (biased,) = decide(questions=[choice("a", "b")])["answers"]
    assert biased["choice"] == "a"
    (fair,) = decide(questions=[choice("a", "b")], orders=2)["answers"]
    assert fair["choice"] == "b"
    for values in ("abc", "bca", "cba"):
        answer = decide(questions=[choice(*values)], orders=3)
        by_value = {p["value"]: p["probability"] for p in answer["answers"][0]["probabilities"]}
        assert max(by_value, key=lambda value: by_value[value]) == "b"
        assert answer["diagnostics"][0]["order_gap"] > 0.1


def test_reversed_questions_keep_their_answers() -> None:
    questions = [choice("a", "b"), choice("c", "d"), choice("b", "d", "a", "c")]
    for orders in (1, 2, 3, 4):
        answers = decide(questions=questions, orders=orders)["answers"]
        for question, answer in zip(questions, answers, strict=True):
            (lone,) = decide(questions=[question], orders=orders)["answers"]
            assert answer == lone


def test_too_little_mass_is_a_refusal() -> None:
    body = {"questions": [{**choice("a", "b"), "name": "n"}]}
    assert decide(Settings(decisions_least_mass=0.5), **body)["answers"][0]["type"] == "choice"
    refusals = decide(Settings(decisions_least_mass=0.6), **body)["answers"]
    assert refusals == [{"type": "refusal", "name": "n"}]
    body = {"state": "x", "questions": {"n": {"type": "noul"}}, "input": None}
    answers = decide(Settings(decisions_least_mass=0.6), **body)["answers"]
    assert answers == {"n": {"type": "refusal"}}


def overconfident(count: int) -> list[tuple[list[float], int]]:
    """Return probabilities that are too sure by the planted temperature, and right labels."""
    draw, examples = random.Random(3), []
    for number in range(count):
        logits = [draw.gauss(0, 2) for _ in range(3)]
        right = KindCalibration().applied("abc", [math.exp(value) for value in logits])
        sure = KindCalibration(1 / PLANTED).applied("abc", right)
        # Evenly spread numbers give the labels nearly their exact frequencies.
        place, label = number * (math.sqrt(5) - 1) / 2 % 1, 0
        while label < 2 and place > right[label]:
            place -= right[label]
            label += 1
        examples.append((sure, label))
    return examples


def test_a_planted_temperature_is_found() -> None:
    examples = overconfident(20_000)
    temperature = fit_temperature(examples)
    assert temperature == pytest.approx(PLANTED, rel=0.02)
    before, after = calibration_error(examples), calibration_error(examples, temperature)
    assert after < before / 4


def test_the_script_fits_a_server(tmp_path: Path) -> None:
    examples = overconfident(300)

    class Server(Stub):
        def reply(self, path: str, body: Any) -> tuple[int, Any]:
            assert (path, body["calibrated"]) == ("/v1/decisions", False)
            values, (probabilities, _) = "abc", examples[int(body["input"])]
            pairs = [
                {"value": v, "probability": p} for v, p in zip(values, probabilities, strict=True)
            ]
            answers = [{"type": "choice", "probabilities": pairs}, {"type": "refusal"}]
            return 200, {"model": "m", "answers": answers}

    lines = [
        json.dumps({"body": {"input": str(number)}, "answers": ["abc"[label], True]})
        for number, (_, label) in enumerate(examples)
    ]
    labelled, output = tmp_path / "labelled.jsonl", tmp_path / "calibration.json"
    labelled.write_text("\n".join(lines))
    main = runpy.run_path(str(SCRIPT), run_name="calibrate")["main"]
    with Server().serving() as server:
        assert main([str(labelled), str(output), "--url", server.url]) == 0
        labelled.write_text(json.dumps({"body": {"input": "0"}, "answers": ["z"]}))
        assert main([str(labelled), str(tmp_path / "none"), "--url", server.url]) == 1
    content = json.loads(output.read_text())
    assert (content["model"], content["num_labelled"]) == ("m", 300)
    assert content["types"]["choice"]["temperature"] == pytest.approx(PLANTED, rel=0.15)
    assert content["ece_after"] < content["ece_before"]
    assert load(str(output), ["m"]).kinds.keys() == {"choice"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "wanted a JSON file"),
        ('{"model": "other", "types": {}}', "model: given 'other'; wanted 'm'"),
        ('{"model": "m"}', "wanted an object with model and types"),
        ('{"model": "m", "types": {"x": {}}}', "types: given 'x'; wanted predicate, choice"),
        ('{"model": "m", "types": {"choice": {"temperature": 0}}}', "temperature: given 0"),
        (
            '{"model": "m", "types": {"choice": {"temperature": 1, "bias": {"A": "x"}}}}',
            "bias: wanted an object of numbers",
        ),
    ],
)
def test_calibration_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(content)
    with pytest.raises(ServerConfigError, match="decision_calibration: ") as caught:
        load(str(file), ["m"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bias_shifts_a_label() -> None:
    shifted = KindCalibration(1.0, {"A": math.log(3)}).applied("AB", [0.5, 0.5])
    assert shifted == pytest.approx([0.75, 0.25])


def letters(text: str) -> list[int]:
    return [ord(character) for character in text]


def words(text: str) -> list[int]:
    """Join a space to the letter after it, as most tokenizers do."""
    tokens: list[int] = []
    for character in text:
        if tokens and tokens[-1] == ord(" ") and character.isalnum():
            tokens[-1] = 1000 + ord(character)
        else:
            tokens.append(ord(character))
    return tokens


def merged(text: str) -> list[int]:
    """Join the colon, too, so that no label is a token of its own."""
    tokens: list[int] = []
    for character in text:
        if len(tokens) > 1 and tokens[-2:] == [ord(":"), ord(" ")] and character.isalnum():
            tokens[-2:] = [2000 + ord(character)]
        else:
            tokens.append(ord(character))
    return tokens


def questions() -> list[Question]:
    return [
        build_question("a", "noul", "Is it?", {"true": "so"}, 26),
        build_question("b", "choice", "Which?", {"x": None, "y": "z"}, 26),
        build_question("c", "score", "Much?", ["low", "high"], 26),
    ]


@pytest.mark.parametrize(
    ("encode", "before", "label", "form"),
    [
        (letters, "2: ", ord("A"), "short"),
        (words, "2:", 1000 + ord("A"), "short"),
        (merged, "\nQuestion 2:\n", ord("A"), "long"),
    ],
)
def test_the_short_form_fits_the_tokenizer(encode: Any, before: str, label: int, form: str) -> None:
    sheet = sheet_of("S", questions(), "short", Labels(encode), has_codes=True)
    assert sheet.form == form
    second = sheet.answers[1]
    line_end = "\n" if form == "short" else ""
    assert second.before == letters(line_end + before)
    assert second.labels[0] == label
    assert [len(answer.labels) for answer in sheet.answers] == [2, 2, 2]
    if form == "short":
        *_, first, middle, last = sheet.content.splitlines()
        assert first == "1. Is it? yes: so"
        assert middle == "2. Which? A: x; B: y - z"
        assert last == "3. Much? 0: low; 1: high"
        assert sheet.end == letters("\n")


def test_codes_are_single_tokens_and_begin_with_letters() -> None:
    codes = Labels(letters).codes(Place("1: "))
    assert len(codes) == 62
    assert "".join(codes[:26]) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert list(codes[26:]) == sorted(codes[26:])
    few = build_question("q", "choice", "", dict.fromkeys("ab"), 26)
    many = Question("q", few.type, "x", few.options * 15, ())
    sheet = sheet_of("S", [many, many], "short", Labels(letters), has_codes=True)
    assert len(set(sheet.answers[0].labels)) == 30

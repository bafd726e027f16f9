# SPDX-License-Identifier: Apache-2.0
"""OpenAI's decisions: both bodies, the types of answers, and refusals."""

import json
import random
from typing import Any

import pytest
import torch
from openai import OpenAI
from reference import likelihood

from tests.decision_bodies import broken
from tests.server.client import Client, refusal
from tests.server.process import MODEL_NAME
from tests.server.reference import CLOSE, mask_id, model, tokenizer

ROUTE = "/v1/decisions"
SYSTEM_ONE = "/v1/systemone"
INPUT = "What is the capital of France? Paris."
PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "Is Paris a capital?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "name": "kind",
    "instructions": "Which?",
    "choices": [{"value": "true"}, {"value": True, "description": "logic"}, {"value": "city"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "size",
    "instructions": "How large?",
    "levels": [{"label": "low"}, {"label": "high", "description": "very"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]
NUM_BODIES = 200
HEADERS = {"Content-Type": "application/json"}
EXACT = {"rel": 0, "abs": 2e-6}


def decide(client: Client, **body: Any) -> dict[str, Any]:
    return client.answer(ROUTE, {"input": INPUT, "questions": QUESTIONS, **body})


def choice_of(*values: Any) -> dict[str, Any]:
    return {**CHOICE, "choices": [{"value": value} for value in values]}


def numbers(answers: Any) -> list[float]:
    """Return all probabilities of OpenAI's or System One's answers, in order."""
    result = []
    for answer in answers.values() if isinstance(answers, dict) else answers:
        if "probability" in answer:
            result.append(answer["probability"])
        elif "noul" in answer:
            result.append(answer["noul"])
        elif isinstance(answer["probabilities"], dict):
            result += answer["probabilities"].values()
        else:
            result += [pair["probability"] for pair in answer["probabilities"]]
    return result


def test_openais_client_reads_typed_answers(openai: OpenAI) -> None:
    decision = openai.decisions.create(model=MODEL_NAME, input=INPUT, questions=QUESTIONS)
    predicate, choice, score = decision.answers
    assert [answer.type for answer in decision.answers] == ["predicate", "choice", "score"]
    assert [answer.name for answer in decision.answers] == [None, "kind", "size"]
    assert predicate.type == "predicate"
    assert 0 < predicate.probability < 1
    assert choice.type == "choice"
    values = [pair.value for pair in choice.probabilities]
    assert [(type(v), v) for v in values] == [(str, "true"), (bool, True), (str, "city")]
    best = max(choice.probabilities, key=lambda pair: pair.probability)
    assert choice.choice is best.value or choice.choice == best.value
    assert sum(pair.probability for pair in choice.probabilities) == pytest.approx(1, abs=3e-6)
    assert score.type == "score"
    assert [(p.value, p.label) for p in score.probabilities] == [(0, "low"), (1, "high")]
    assert score.score == pytest.approx(score.probabilities[1].probability, abs=2e-6)
    usage = decision.usage
    assert usage.input_tokens == usage.total_tokens > 0
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert (usage.input_tokens_details.cached_tokens, decision.model) == (0, MODEL_NAME)


def test_a_call_is_one_forward(client: Client) -> None:
    before = client.metric("dllm:forwards_total")
    answer = decide(client)
    assert client.metric("dllm:forwards_total") == before + 1
    assert answer["diffusion"]["num_forwards"] == 1
    assert answer["diffusion"]["format"] == "short"
    assert answer.keys() == {"model", "answers", "usage", "diagnostics", "diffusion"}


SHEET = f"""{INPUT}

Answer every question on its own line: the number of the question, a colon, the answer. \
A question without options: yes or no. \
A question with lettered options: the letter of one option. \
A question with numbered levels: the number of one level.
1. Is Paris a capital?
2. Which? A: "true"; B: true - logic; C: "city"
3. How large? 0: low; 1: high - very"""


def test_the_short_form_is_read_as_the_reference_model_reads_it(client: Client) -> None:
    def encode(text: str) -> list[int]:
        return list(tokenizer().encode(text, add_special_tokens=False))

    tokens = list(
        tokenizer().apply_chat_template(
            [{"role": "user", "content": SHEET}], add_generation_prompt=True, return_dict=False
        )
    )
    positions, line_end = [], encode("\n")
    for number in (1, 2, 3):
        tokens += encode(f"{number}:")
        positions.append(len(tokens))
        tokens += [mask_id(), *line_end]
    tokens.append(tokenizer().convert_tokens_to_ids("<|eot_id|>"))
    rows = likelihood.log_probabilities(model(), tokens, 0, 0.0, mask_id())
    wanted, masses = [], []
    for position, labels in zip(positions, (("yes", "no"), "ABC", "01"), strict=True):
        values = rows[position][[encode(f"1: {label}")[2] for label in labels]]
        wanted.append(torch.softmax(values, dim=0).tolist())
        masses.append(values.exp().sum().item())
    answer = decide(client)
    assert numbers(answer["answers"]) == pytest.approx(
        [wanted[0][0], *wanted[1], *wanted[2]], rel=2e-5, abs=2e-5
    )
    actual = [one["label_mass"] for one in answer["diagnostics"]]
    assert actual == pytest.approx(masses, **CLOSE)
    assert answer["usage"]["input_tokens"] == len(tokens)


def test_both_bodies_and_systemone_agree(client: Client) -> None:
    questions = {
        "a": {"type": "noul", "instructions": PREDICATE["instructions"]},
        "b": {"type": "choice", "instructions": "Which?", "criteria": {'"x"': None, "true": "t"}},
        "c": {"type": "score", "instructions": "How large?", "criteria": ["low", "high"]},
    }
    same = [
        PREDICATE,
        {
            **CHOICE,
            "choices": [{"value": "x"}, {"value": True, "description": "t"}],
        },
        {**SCORE, "levels": [{"label": "low"}, {"label": "high"}]},
    ]
    for form in ("long", "short"):
        openai = decide(client, questions=same, format=form)
        body = {"state": INPUT, "questions": questions, "format": form}
        system_one = client.answer(ROUTE, body)
        old = client.answer(SYSTEM_ONE, body)
        assert numbers(openai["answers"]) == pytest.approx(numbers(old["answers"]), **EXACT)
        assert numbers(system_one["answers"]) == pytest.approx(numbers(old["answers"]), **EXACT)
        assert system_one["usage"] == old["usage"]
        assert openai["usage"]["input_tokens"] == old["usage"]["input_tokens"]
        assert system_one["object"] == "structured_decision"
        assert system_one["diagnostics"].keys() == questions.keys()


def test_separate_sequences_are_calls_of_one_question(client: Client) -> None:
    answer = decide(client, joint=False)
    lone = [decide(client, questions=[question]) for question in QUESTIONS]
    wanted = [number for one in lone for number in numbers(one["answers"])]
    assert numbers(answer["answers"]) == pytest.approx(wanted, **EXACT)
    assert answer["diffusion"]["num_forwards"] == len(QUESTIONS)
    assert answer["diffusion"]["joint"] is False
    assert answer["usage"]["input_tokens"] == sum(one["usage"]["input_tokens"] for one in lone)


def test_hundreds_of_questions_are_divided(client: Client) -> None:
    answer = decide(client, questions=[PREDICATE] * 400)
    assert len(answer["answers"]) == 400
    assert answer["diffusion"]["joint_parts"] == answer["diffusion"]["num_forwards"] == 2


def test_more_choices_than_letters(client: Client) -> None:
    values = [f"option {number}" for number in range(200)]
    (answer,) = decide(client, questions=[choice_of(*values)])["answers"]
    assert [pair["value"] for pair in answer["probabilities"]] == values
    assert sum(pair["probability"] for pair in answer["probabilities"]) == pytest.approx(
        1, abs=1e-4
    )
    assert answer["choice"] in values


@pytest.mark.parametrize("values", [("b", "a"), ("c", "a", "b"), ("d", "b", "c", "a")])
def test_the_order_of_options_cancels_out(client: Client, values: tuple[str, ...]) -> None:
    num = len(values)
    first = decide(client, questions=[choice_of(*values)], orders=num)
    for step in range(1, num):
        turned = values[step:] + values[:step]
        other = decide(client, questions=[choice_of(*turned)], orders=num)
        by_value = [
            {pair["value"]: pair["probability"] for pair in one["answers"][0]["probabilities"]}
            for one in (first, other)
        ]
        assert by_value[1] == pytest.approx(by_value[0], **EXACT)
    assert first["diffusion"]["num_forwards"] == num
    assert first["diagnostics"][0]["order_gap"] > 0


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
INPUTS: list[tuple[Any, str]] = [
    ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "a\n\nb"),
    (
        [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "a",
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    },
                    {"type": "input_json", "data": {"k": [1, None]}},
                ],
            }
        ],
        'a\n{"k":[1,null]}',
    ),
    (
        [{"content": "s", "role": "system"}, OUTPUT, CALL],
        '[{"role":"system","content":"s"},'
        '{"type":"function_call_output","call_id":"1","output":"x"},'
        '{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}]',
    ),
    (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "phase": None}],
        '[{"role":"assistant","content":[{"type":"refusal","refusal":"no"}]}]',
    ),
]


@pytest.mark.parametrize(("given", "text"), INPUTS)
def test_inputs_are_read_as_text(client: Client, given: Any, text: str) -> None:
    actual, wanted = decide(client, input=given), decide(client, input=text)
    assert actual["answers"] == wanted["answers"]
    assert actual["usage"] == wanted["usage"]


def test_instructions_have_parts(client: Client) -> None:
    parts = [{"type": "input_text", "text": "Is Paris"}, {"type": "input_json", "data": {"a": 1}}]
    actual = decide(client, questions=[{**PREDICATE, "instructions": parts}])
    text = decide(client, questions=[{**PREDICATE, "instructions": 'Is Paris\n{"a":1}'}])
    assert actual["answers"] == text["answers"]


def test_fields_without_effect_are_accepted(client: Client) -> None:
    body = {
        "safety_identifier": "x" * 128,
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "cache_salt": "s",
        "priority": 1,
        "timeout_s": 60,
        "calibrated": True,
    }
    assert decide(client, **body)["answers"] == decide(client)["answers"]


def test_a_question_that_looks_like_a_reply(client: Client) -> None:
    text = "Is it?\n1: no\n2: no\n<|eot_id|>"
    answers = decide(client, questions=[{**PREDICATE, "instructions": text}, PREDICATE])["answers"]
    assert [answer["type"] for answer in answers] == ["predicate", "predicate"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"state": "x"}, "input, state: both given; wanted one"),
    ({"input": None}, "input, state: given nothing; wanted one"),
    ({"questions": [PREDICATE] * 401}, "questions: given 401; wanted 1 to 400"),
    ({"questions": []}, "questions: given 0; wanted 1 to 400"),
    ({"questions": {"a": PREDICATE}}, "questions: given an object of 1; wanted a list of 1 to 400"),
    (
        {"questions": [*QUESTIONS, choice_of(*map(str, range(300)))]},
        "questions[3].choices: given 300; wanted 2 to 255",
    ),
    ({"questions": [choice_of("a")]}, "questions[0].choices: given 1; wanted 2 to 255"),
    (
        {"questions": [*QUESTIONS, choice_of(*"bcdefgaa")]},
        'questions[3].choices[7].value: "a" stands twice',
    ),
    ({"questions": [choice_of(True, True)]}, "questions[0].choices[1].value: true stands twice"),
    ({"questions": [choice_of("a", 1)]}, "questions[0].choices[1].value: given 1; wanted a string"),
    (
        {"questions": [{**SCORE, "levels": [{"label": "a"}] * 11}]},
        "questions[0].levels: given 11; wanted 2 to 10",
    ),
    (
        {"questions": [PREDICATE, PREDICATE, {**PREDICATE, "name": None}]},
        "questions[2].name: given null; wanted a string or nothing",
    ),
    ({"questions": [{**PREDICATE, "criteria": 1}]}, "questions[0].criteria: unknown parameter"),
    ({"questions": [{"type": "box"}]}, 'questions[0].type: given "box"; wanted predicate, choice'),
    (
        {
            "input": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            ]
        },
        "input[1].content[0]: input_image; wanted text",
    ),
    (
        {"input": [{**OUTPUT, "call_id": "call_1"}]},
        "input: call_id call_1 has an output and no call",
    ),
    ({"input": "a <|mdm_mask|>"}, "input: holds the mask token"),
    ({"input": [{"role": "tool", "content": "a"}]}, 'input[0].role: given "tool"; wanted user'),
    ({"input": "x" * 9000}, "input: given "),
    ({"stream": True}, "stream: unknown parameter"),
    ({"joint": "yes"}, 'joint: given "yes"; wanted true or false'),
    ({"joint": False, "passes": 2}, "passes: given 2; wanted 1"),
    ({"orders": 5}, "orders: given 5; wanted at most 4"),
    ({"cache_salt": "x" * 1025}, "cache_salt: given "),
    ({"safety_identifier": "x" * 129}, "safety_identifier: given 129 characters"),
    ({"timeout_s": 0}, "timeout_s: given 0; wanted at least 0.001"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_is_refused(client: Client, body: dict[str, Any], message: str) -> None:
    response = client.http.post(ROUTE, json={"input": INPUT, "questions": QUESTIONS, **body})
    error = refusal(response)
    assert error["message"].startswith(message)
    assert "\n" not in error["message"]
    assert error["param"] == message.partition(":")[0]


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nested(32), None),
        (nested(33), "given 33 levels or more; wanted at most 32"),
        ({"a": [0] * 9_998}, None),
        ({"a": [0] * 10_000}, "given 10001 values or more; wanted at most 10,000"),
        ({"a": "x" * 262_144}, "given 262152 bytes; wanted at most 262,144"),
        ([1], "given a list of 1; wanted an object or a list of objects"),
    ],
)
def test_limits_of_json(client: Client, data: Any, message: str | None) -> None:
    """Data within the limits is refused only if the model cannot hold it."""
    part = {"type": "input_json", "data": data}
    body = {"input": [{"role": "user", "content": [part]}], "questions": [PREDICATE]}
    response = client.http.post(ROUTE, json=body)
    if message is not None:
        assert refusal(response)["message"] == f"input[0].content[0].data: {message}"
    elif response.status_code != 200:
        assert refusal(response)["message"].endswith("tokens; wanted at most 4096")


def test_random_bodies_are_answered_or_refused_by_name(client: Client) -> None:
    draw, statuses = random.Random(11), set()
    for _ in range(NUM_BODIES):
        content = json.dumps(broken(draw, model=MODEL_NAME))
        response = client.http.post(ROUTE, content=content, headers=HEADERS)
        statuses.add(response.status_code)
        if response.status_code not in (200, 404):  # a broken name is that of another model
            assert refusal(response)["param"]
    assert {200, 400} <= statuses


def test_a_time_ends_all_reads_of_a_call(client: Client) -> None:
    body = {"input": "x" * 3000, "questions": QUESTIONS, "joint": False, "timeout_s": 0.001}
    assert refusal(client.http.post(ROUTE, json=body), 504)["param"] == "timeout_s"
    client.wait_for_num_requests(0)


def test_another_model_is_not_found(client: Client) -> None:
    body = {"model": "gpt-6-luna", "input": INPUT, "questions": QUESTIONS}
    refusal(client.http.post(ROUTE, json=body), 404)


def test_systemone_names_the_route_of_openais_body(client: Client) -> None:
    error = refusal(client.http.post(SYSTEM_ONE, json={"input": INPUT, "questions": QUESTIONS}))
    assert error["param"] == "input"
    assert "/v1/decisions" in error["message"]


def test_a_server_without_calibration(client: Client) -> None:
    refusal(client.http.get("/v1/decisions/calibration"), 404)

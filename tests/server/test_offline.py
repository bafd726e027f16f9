# SPDX-License-Identifier: Apache-2.0
"""Offline inference in a user's script: `LLM` with the engine in a spawned process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.client import ANSWER, PUZZLE, QUESTION
from tests.server.fork_server import ForkServer
from tests.server.process import START_S, environment

SCRIPT = """
import json
import sys

from vllm import LLM, SamplingParams

MODEL, QUESTION, PUZZLE = sys.argv[1:]


def main():
    llm = LLM(model=MODEL, dtype="float32")
    conversation = [{"role": "user", "content": QUESTION}]
    greedy = SamplingParams(temperature=0.0, max_tokens=32)

    def texts_and_ids(outputs):
        return [[o.outputs[0].text, list(o.outputs[0].token_ids)] for o in outputs]

    def canvas(**fields):
        extra = {"gen_length": 64, "steps": 16, "ignore_eos": True, **fields}
        return SamplingParams(temperature=1.0, seed=3, extra_args=extra)

    results = {"chat": texts_and_ids(llm.chat(conversation, greedy))}
    as_they_stand = SamplingParams(temperature=1.0, max_tokens=100)
    results["plain"] = texts_and_ids(llm.generate([QUESTION, PUZZLE], as_they_stand))
    results["extra"] = texts_and_ids(llm.generate([PUZZLE], canvas()))
    try:
        llm.generate([PUZZLE], canvas(stepz=8))
    except Exception as error:
        results["refusal"] = f"{type(error).__name__}: {error}"
    results["cut"] = []
    for prompt, fields in (
        (QUESTION, {"stop": ["\\ud800"]}),
        (QUESTION, {"stop": ["\\ud800"], "n": 2}),
        (QUESTION, {"bad_words": ["a \\udc00"]}),
        (QUESTION, {"extra_args": {"algorithm": "\\ud800"}}),
        ("\\ud83d", {}),
        (QUESTION, {"ignore_eos": None, "stop": ["a"]}),
    ):
        try:
            sampled = SamplingParams(temperature=1.0, max_tokens=32, **fields)
            llm.generate([QUESTION, prompt], [greedy, sampled])
            results["cut"].append("answered")
        except ValueError as error:
            results["cut"].append(str(error))
    results["types"] = []
    for prompt, extra in (
        ({"prompt_token_ids": [1, "a"]}, None),
        ({"prompt_token_ids": [[1]]}, None),
        (QUESTION, ["steps"]),
        (QUESTION, {5: 5}),
    ):
        try:
            llm.generate(prompt, SamplingParams(max_tokens=32, extra_args=extra))
        except ValueError as error:
            results["types"].append(str(error))
    results["templates"] = []
    for options in (
        {"chat_template": "{% for }"},
        {"chat_template": "{{ nothing.at.all }}"},
        {"chat_template": "{{ raise_exception('never') }}"},
        {"chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}},
    ):
        try:
            llm.chat(conversation, greedy, **options)
        except ValueError as error:
            results["templates"].append(str(error))
    results["held"] = llm.llm_engine.has_unfinished_requests()
    two = [canvas(), canvas(remasking="random")]
    results["several"] = texts_and_ids(llm.generate([PUZZLE, QUESTION], two))
    print("FOUND " + json.dumps(results))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def results(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the script and return what it printed."""
    folder = tmp_path_factory.mktemp("offline")
    script = folder / "offline.py"
    script.write_text(SCRIPT)
    command, log = [str(script), str(model_dir), QUESTION, PUZZLE], folder / "log"
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    status = ForkServer(command, log, environment(**variables)).wait(START_S)
    printed = log.read_text()
    assert status == 0 and "Traceback" not in printed, printed
    (line,) = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    result: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return result


def test_answers_of_the_script(results: dict[str, Any], client: Any) -> None:
    """Sampling parameters act unchanged, one per prompt, and answers equal those of the server."""
    assert results["chat"][0][0] == ANSWER
    assert len(results["plain"]) == 2
    assert all(0 < len(token_ids) <= 100 for _, token_ids in results["plain"])
    ((_, token_ids),) = results["extra"]
    assert len(token_ids) == 64
    first, second = results["several"]
    assert [first] == results["extra"]
    assert len(second[1]) == 64
    served = client.generate(
        prompt=PUZZLE, gen_length=64, steps=16, ignore_eos=True, temperature=1.0, seed=3
    )
    assert served["token_ids"][0] == token_ids


def test_a_refusal_names_the_field_and_the_engine_goes_on(results: dict[str, Any]) -> None:
    assert "stepz: given 8; unknown parameter" in results["refusal"]
    assert results["several"]


def test_a_request_that_cannot_be_sent_leaves_nothing(results: dict[str, Any]) -> None:
    """Half a character in any text, or a value of a type that messages lack, sends no request."""
    stops, several, words, extra, prompt, empty = results["cut"]
    assert stops == several
    for message, field in ((stops, "stop[0]"), (words, "bad_words[0]"), (prompt, "prompt")):
        assert message.startswith(f"{field}: given '") and "half a character" in message
    assert extra.startswith("extra_args.algorithm: given '")
    assert empty.startswith("ignore_eos: given nothing; ")
    assert results["held"] is False


def test_values_of_other_types_are_refused(results: dict[str, Any]) -> None:
    wanted = "wanted a dictionary of names and values"
    assert results["types"] == [
        "prompt: given [1, 'a']; wanted token ids",
        "prompt: given [[1]]; wanted token ids",
        f"extra_args: given ['steps']; {wanted}",
        f"extra_args: given {{5: 5}}; {wanted}",
    ]


def test_a_template_that_fails_is_named_in_one_line(results: dict[str, Any]) -> None:
    syntax, undefined, own, padding = results["templates"]
    assert syntax.startswith("chat_template: given '{% for }'; wanted ")
    assert undefined.startswith("chat_template: given '{{ nothing.at.all }}'; wanted ")
    assert own.startswith("messages: given [{") and own.endswith("refuses them: never")
    assert padding.startswith("chat_template_kwargs.padding: given 'max_length'; wanted none")
    assert not any("\n" in message for message in results["templates"])

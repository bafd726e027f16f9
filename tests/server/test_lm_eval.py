# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with the server: a real run if it is installed, or else its requests.

The tasks are local files, so that nothing is downloaded: a written answer, a choice, the likelihood
of a continuation, and the likelihood of a whole text.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from reference import likelihood

from tests.server.client import ANSWER, COMPLETIONS, QUESTION, Client
from tests.server.process import MODEL, MODEL_NAME, ServerProcess
from tests.server.reference import CLOSE, mask_id, model, tokenizer

DOCUMENTS = (
    {"question": QUESTION, "answer": ANSWER, "choices": [ANSWER, "7"], "label": 0},
    {"question": "What is 2 plus 3?", "answer": "5", "choices": ["Paris", "5"], "label": 1},
)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {output_type}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
metric_list:
  - metric: {metric}
"""
TASKS = {
    "generate_until": (
        "{{question}}",
        "{{answer}}",
        "generation_kwargs: {until: ['\\n'], max_gen_toks: 16, do_sample: false}",
        "exact_match",
    ),
    "multiple_choice": ("{{question}}", "{{label}}", 'doc_to_choice: "{{choices}}"', "acc"),
    "loglikelihood": ("{{question}}", " {{answer}}", "", "perplexity"),
    "loglikelihood_rolling": ("", "{{question}} {{answer}}", "", "word_perplexity"),
}


def chain_of(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the chain's sum, and whether every token is the likeliest, as the harness does."""
    rows = likelihood.chain(model(), [*context, *continuation], mask_id())[len(context) - 1 :]
    values = [row[token].item() for row, token in zip(rows, continuation, strict=True)]
    best = [row.max().item() for row in rows]
    return math.fsum(values), values == best


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("is_tokenized", [True, False])
def test_its_requests_for_likelihoods(client: Client, is_tokenized: bool) -> None:
    """The harness sends a batch of prompts, generates one more token and sums the logprobs."""
    pairs = [(ids(d["question"]), ids(" " + d["answer"])) for d in DOCUMENTS]
    prompts: list[Any] = [[*context, *target] for context, target in pairs]
    if not is_tokenized:
        prompts = [tokenizer().decode(prompt) for prompt in prompts]
    body = {"model": MODEL_NAME, "prompt": prompts, "temperature": 0, "seed": 1234}
    body |= {"max_tokens": 1, "logprobs": 1, "echo": True}
    choices = client.answer(COMPLETIONS, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for choice, (context, target) in zip(choices, pairs, strict=True):
        report = choice["logprobs"]
        values = report["token_logprobs"][len(context) : -1]
        tops = report["top_logprobs"][len(context) : -1]
        is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
        total, greedy = chain_of(context, target)
        assert math.fsum(values) == pytest.approx(total, **CLOSE)
        assert is_greedy is greedy


def test_its_requests_for_text(client: Client) -> None:
    prompts = [ids(d["question"]) for d in DOCUMENTS]
    body = {"model": MODEL_NAME, "prompt": prompts, "temperature": 0, "seed": 1234}
    body |= {"max_tokens": 16, "stop": ["\n", "<|endoftext|>"]}
    choices = client.answer(COMPLETIONS, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all("\n" not in choice["text"] for choice in choices)


@pytest.mark.parametrize("concurrent", [1, 4])
def test_a_run_of_it(server: ServerProcess, tmp_path: Path, concurrent: int) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for output_type, (text, target, more, metric) in TASKS.items():
        names = {"name": f"local_{output_type}", "output_type": output_type, "metric": metric}
        task = TASK.format(**names, data=data, text=text, target=target, more=more)
        (tmp_path / f"{output_type}.yaml").write_text(task)
    actual = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL_NAME,
            "base_url": f"{server.url}{COMPLETIONS}",
            "tokenizer": str(MODEL),
            "num_concurrent": concurrent,
            "max_retries": 1,
        },
        tasks=[f"local_{output_type}" for output_type in TASKS],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = actual["samples"]
    assert {len(message) for message in samples.values()} == {len(DOCUMENTS)}
    for document, message in zip(DOCUMENTS, samples["local_loglikelihood"], strict=True):
        (answer,) = message["filtered_resps"]
        total, is_greedy = chain_of(ids(document["question"]), ids(" " + document["answer"]))
        assert answer[0] == pytest.approx(total, **CLOSE)
        assert answer[1] is is_greedy
    for document, message in zip(DOCUMENTS, samples["local_multiple_choice"], strict=True):
        context = ids(document["question"])
        totals = [chain_of(context, ids(" " + choice))[0] for choice in document["choices"]]
        assert [answer[0] for answer in message["filtered_resps"]] == pytest.approx(totals, **CLOSE)
    for document, message in zip(DOCUMENTS, samples["local_loglikelihood_rolling"], strict=True):
        whole = ids(f"{document['question']} {document['answer']}")
        first = tokenizer().bos_token_id
        first = tokenizer().eos_token_id if first is None else first
        (answer,) = message["filtered_resps"]
        assert answer == pytest.approx(chain_of([first], whole)[0], **CLOSE)

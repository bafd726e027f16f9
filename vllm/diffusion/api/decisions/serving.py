# SPDX-License-Identifier: Apache-2.0
"""Handler of `POST /v1/decisions`: answers the questions of both bodies with masked reads."""

from __future__ import annotations

import math
import time
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.adapter_requests import answered_model
from vllm.diffusion.api.decisions.calibration import load
from vllm.diffusion.api.decisions.calls import DecisionCall, read_body
from vllm.diffusion.api.decisions.faults import BodyFault
from vllm.diffusion.api.decisions.orders import in_order, is_reversed, option_orders, undo
from vllm.diffusion.api.likelihood.prompt_scores import TERMS
from vllm.diffusion.api.likelihood.sheets import LONG, SHORT, OptionLimitError
from vllm.diffusion.api.likelihood.typed_decisions import ReadOptions, SequenceTooLong
from vllm.diffusion.api.protocol import check_model
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.entrypoints.openai.decisions.question_types import StructuredDecisionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.api.decisions.calibration import Calibration
    from vllm.diffusion.api.decisions.calls import BodyQuestion
    from vllm.diffusion.api.likelihood.typed_decisions import BlockStrategy, Reading
    from vllm.diffusion.config import Settings
    from vllm.entrypoints.openai.decisions.strategies import QuestionRead

DECIMALS = 6  # decimals of the numbers in OpenAI's answers


@dataclass
class _Result:
    """The result of a question, averaged over all orders; options are in the order of the body."""

    item: BodyQuestion
    probabilities: list[float]
    label_mass: float
    argmax_is_label: bool
    order_gap: float | None

    @property
    def best(self) -> int:
        return self.probabilities.index(max(self.probabilities))

    @property
    def confidence(self) -> float:
        return self.probabilities[self.best] * self.label_mass

    def diagnostics(self) -> dict[str, Any]:
        values = {"label_mass": self.label_mass, "argmax_is_label": self.argmax_is_label}
        return values if self.order_gap is None else {**values, "order_gap": self.order_gap}


class DecisionsHandler:
    """Handler of `/v1/decisions`.

    Args:
        strategy: reads the questions.
        model_names: names of the served model.
        settings: settings of the server.
        file: the calibration, if there is one.

    Attributes:
        calibration: the calibration that applies unless a request turns it off.
    """

    def __init__(
        self,
        strategy: BlockStrategy,
        model_names: Sequence[str],
        settings: Settings,
        file: Calibration | None,
    ) -> None:
        self._strategy = strategy
        self._model_names = model_names
        self._settings = settings
        self.calibration = file

    async def answer(
        self,
        body: Mapping[str, Any],
        request_id: str,
    ) -> dict[str, Any]:
        """Answer a body in its own form. Cancelling this coroutine aborts all reads.

        Args:
            body: the fields as sent.
            request_id: id of the HTTP request.

        Raises:
            RequestRefused: HTTP 400, naming the field.
            VLLMNotFoundError: HTTP 404, for a model that is not served.
        """
        try:
            call = read_body(body)
            check_model(body.get("model"), self._model_names)
            self._refuse_mask_tokens(call)
            options = self._options(call)
            orders = [option_orders(a, call.values.get("orders", 1)) for a in call.questions]
            reading = await self._read(call, options, orders, request_id)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        is_calibrated = self.calibration is not None and call.values.get("calibrated", True)
        results = [
            _combined(
                item,
                orders[number],
                [_of_order(reading, order, number) for order in range(len(reading.orders))],
                self.calibration if is_calibrated else None,
            )
            for number, item in enumerate(call.questions)
        ]
        report = _report(reading, options, is_calibrated)
        content = self._openai if call.is_openai else self._system_one
        return {**content(results, reading, request_id), "diffusion": report}

    def _options(self, call: DecisionCall) -> ReadOptions:
        values = call.values
        can_join = self._strategy.max_passes > 1
        if values.get("joint") and not can_join:
            raise BodyFault("joint", "given true; this model reads each question by itself")
        is_joint = can_join and values.get("joint", self._settings.decisions_joint)
        if values.get("passes", 1) > 1 and not is_joint:
            text = "given 2; wanted 1: this model reads each question by itself"
            raise BodyFault("passes", "given 2; wanted 1 with joint: false" if can_join else text)
        return ReadOptions(
            passes=values.get("passes", 1),
            form=values.get("format", SHORT),
            has_codes=True,
            is_joint=is_joint,
            in_parts=True,
            shares_prefix=True,
            cache_salt=call.cache_salt,
            terms={name: values[name] for name in TERMS if name in values},
        )

    def _refuse_mask_tokens(self, call: DecisionCall) -> None:
        mask = self._strategy.mask_token
        if mask in call.state:
            raise BodyFault(call.state_field, "holds the mask token")
        if mask in (call.instructions or ""):
            raise BodyFault("instructions", "holds the mask token")
        for item in call.questions:
            question = item.question
            if mask in question.instructions:
                raise BodyFault(f"{item.path}.instructions", "holds the mask token")
            if any(mask in f"{o.name} {o.description}" for o in question.options):
                raise BodyFault(f"{item.path}.{item.options_field}", "holds the mask token")

    async def _read(
        self,
        call: DecisionCall,
        options: ReadOptions,
        orders: Sequence[Sequence[tuple[int, ...]]],
        request_id: str,
    ) -> Reading:
        """Read the call in all orders, in one step."""
        strategy = copy(self._strategy)
        strategy.options = options
        calls = []
        for number in range(len(orders[0])):
            questions = [
                in_order(item.question, of_question[number])
                for item, of_question in zip(call.questions, orders, strict=True)
            ]
            calls.append(questions[::-1] if is_reversed(number) else questions)
        try:
            return await strategy.read_orders(
                calls,
                call.instructions,
                call.state,
                request_id=f"decision-{request_id}",
                chat_template_kwargs=call.template_kwargs,
            )
        except SequenceTooLong as error:
            raise BodyFault(call.state_field, str(error)) from None
        except OptionLimitError as error:
            (item,) = [a for a in call.questions if a.question.id == error.question.id]
            given, limit = len(item.question.options), error.limit
            path = f"{item.path}.{item.options_field}"
            raise BodyFault(path, f"given {given}; wanted 2 to {limit}") from None
        except StructuredDecisionError as error:
            raise BodyFault(call.state_field, " ".join(str(error).split())) from None
        except ValueError as error:  # a refusal by the chat template
            if getattr(error, "parameter", None) is not None:
                raise
            field = "chat_template_kwargs" if call.template_kwargs else "model"
            raise BodyFault(field, " ".join(str(error).split())) from None

    def _is_refused(self, result: _Result) -> bool:
        return result.label_mass < self._settings.decisions_least_mass

    def _openai(
        self, results: Sequence[_Result], reading: Reading, request_id: str
    ) -> dict[str, Any]:
        answers = [
            {"type": "refusal", "name": result.item.name}
            if self._is_refused(result)
            else _openai_answer(result)
            for result in results
        ]
        return {
            "model": answered_model(self._model_names),
            "answers": answers,
            "usage": {
                "input_tokens": reading.num_tokens,
                "input_tokens_details": {
                    "cached_tokens": reading.num_cached,
                    "cache_write_tokens": 0,
                },
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reading.num_tokens,
            },
            "diagnostics": [result.diagnostics() for result in results],
        }

    def _system_one(
        self, results: Sequence[_Result], reading: Reading, request_id: str
    ) -> dict[str, Any]:
        answers = {}
        for result in results:
            question = result.item.question
            answers[question.id] = (
                {"type": "refusal"}
                if self._is_refused(result)
                else question.type.answer(question, result.probabilities, result.label_mass)
            )
        return {
            "id": f"decision-{request_id}",
            "object": "structured_decision",
            "created": int(time.time()),
            "model": answered_model(self._model_names),
            "answers": answers,
            "usage": {"input_tokens": reading.num_tokens, "output_tokens": 0},
            "diagnostics": {r.item.question.id: r.diagnostics() for r in results},
        }


def _of_order(reading: Reading, order: int, number: int) -> QuestionRead:
    """Return the read of question `number` of the body in an order, both counted from 0."""
    reads = reading.orders[order]
    return reads[-1 - number] if is_reversed(order) else reads[number]


def _combined(
    item: BodyQuestion,
    orders: Sequence[tuple[int, ...]],
    reads: Sequence[QuestionRead],
    file: Calibration | None,
) -> _Result:
    """Average the reads of a question in all orders."""
    each = []
    for order, read in zip(orders, reads, strict=True):
        values = read.probs
        if file is not None:
            labels = in_order(item.question, order).labels or [""] * len(values)
            values = file.applied(item.kind, labels, values)
        each.append(undo(order, values))
    averages = [math.fsum(values) / len(each) for values in zip(*each, strict=True)]
    gaps = [max(values) - min(values) for values in zip(*each, strict=True)]
    return _Result(
        item,
        averages,
        math.fsum(read.label_mass for read in reads) / len(reads),
        all(read.argmax_is_label for read in reads),
        max(gaps) if len(each) > 1 else None,
    )


def _openai_answer(result: _Result) -> dict[str, Any]:
    """Return an answer of OpenAI's body. The rounded probabilities are not normalised again."""
    item = result.item
    answer: dict[str, Any] = {"type": item.kind, "name": item.name}
    probabilities = [round(p, DECIMALS) for p in result.probabilities]
    if item.kind == "predicate":
        return {**answer, "probability": probabilities[0]}
    confidence = round(result.confidence, DECIMALS)
    if item.kind == "choice":
        pairs = zip(item.values, probabilities, strict=True)
        return {
            **answer,
            "choice": item.values[result.best],
            "probabilities": [{"value": v, "probability": p} for v, p in pairs],
            "confidence": confidence,
        }
    score = math.fsum(index * p for index, p in enumerate(result.probabilities))
    return {
        **answer,
        "score": round(score, DECIMALS),
        "probabilities": [
            {"value": index, "label": label, "probability": p}
            for index, (label, p) in enumerate(zip(item.values, probabilities, strict=True))
        ],
        "confidence": confidence,
    }


def _report(reading: Reading, options: ReadOptions, is_calibrated: bool) -> dict[str, Any]:
    """Return how a call was read."""
    num_orders = len(reading.orders)
    is_joint = options.is_joint
    report = {
        "num_forwards": reading.num_forwards,
        "num_sequences": reading.num_sequences,
        "joint": is_joint,
        "format": SHORT if reading.forms == {SHORT} else LONG,
        "passes": options.passes,
        "orders": num_orders,
        "calibrated": is_calibrated,
    }
    if is_joint and reading.num_sequences > num_orders:
        report["joint_parts"] = reading.num_sequences // num_orders
    return report


def make_handler(
    state: Any, model_names: Sequence[str], model: str, settings: Settings
) -> DecisionsHandler | None:
    """Return the handler of a server; None if upstream serves no typed decisions for the model.

    Args:
        state: state of the application.
        model_names: names of the served model.
        model: its path.
        settings: settings of the server.

    Raises:
        ServerConfigError: the calibration file cannot be used.
    """
    upstreams = state.serving_structured_decisions
    if upstreams is None:
        return None
    upstreams.strategy.labels.count()
    path = settings.decision_calibration
    file = None if path is None else load(path, (*model_names, model))
    return DecisionsHandler(upstreams.strategy, model_names, settings, file)

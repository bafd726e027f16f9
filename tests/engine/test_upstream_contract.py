# SPDX-License-Identifier: Apache-2.0
"""Properties of upstream that the overlay relies on. A failure means that upstream has changed."""

import ast
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from vllm.exceptions import GenerationError, VLLMValidationError

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, finish, logged, record, start
from tests.programs import ROOT, run_python
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.engine.scheduler.outputs import refusal


def test_the_scheduler_implements_the_whole_interface() -> None:
    from vllm.v1.core.sched.interface import SchedulerInterface

    from vllm.diffusion.engine.scheduler.scheduler import DiffusionScheduler

    assert issubclass(DiffusionScheduler, SchedulerInterface)
    assert not inspect.isabstract(DiffusionScheduler)
    assert {
        *("add_request", "finish_requests", "get_grammar_bitmask", "get_num_unfinished_requests"),
        *("get_request_counts", "has_finished_requests", "has_request", "make_stats"),
        *("pause_state", "schedule"),
        *("reset_encoder_cache", "reset_prefix_cache", "set_pause_state", "shutdown"),
        *("update_draft_token_ids", "update_draft_token_ids_in_output", "update_from_output"),
    } <= set(SchedulerInterface.__abstractmethods__)
    assert_same_parameters(SchedulerInterface, DiffusionScheduler)


def test_upstream_asks_whether_a_request_is_held(engine: Engine) -> None:
    """Only requests that are waiting or running are held; upstream asks by the engine's id."""
    from vllm.v1.engine.core import EngineCoreProc

    assert "self.scheduler.has_request(" in inspect.getsource(EngineCoreProc)
    held = engine.scheduler.has_request
    ask = Request(random_prompt(5), {"gen_length": 8, "steps": 4, "ignore_eos": True})
    req_id = start(engine, "a", ask)
    assert engine.scheduler.get_request_counts() == (0, 1) and held(req_id)
    assert not held("a request that never arrived")
    engine.llm.llm_engine.step()
    assert engine.scheduler.get_request_counts() == (1, 0) and held(req_id)
    finish(engine)
    assert not held(req_id)


def test_the_worker_overrides_what_upstream_calls() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from vllm.diffusion.engine.worker.worker import DiffusionWorker

    assert issubclass(DiffusionWorker, WorkerBase)
    for name in (
        *("compile_or_warm_up_model", "execute_model", "get_kv_cache_spec", "get_model"),
        *("get_supported_kv_cache_layouts", "init_device", "load_model", "synchronize_device"),
    ):
        assert name in vars(DiffusionWorker)
        assert callable(getattr(WorkerBase, name)), name
    assert_same_parameters(WorkerBase, DiffusionWorker)


def assert_same_parameters(upstream: type, ours: type) -> None:
    """Check that an override takes at least the parameters that upstream's callers may pass."""
    for name, function in vars(ours).items():
        wanted = inspect.getattr_static(upstream, name, None)
        if name.startswith("__") or not inspect.isfunction(wanted):
            continue
        given = set(inspect.signature(function).parameters)
        missing = set(inspect.signature(wanted).parameters) - given
        assert not missing, f"{ours.__name__}.{name} lacks {missing}"


def test_the_worker_has_what_trainers_call() -> None:
    """Names and parameters are those of upstream's own worker."""
    from vllm.v1.worker import gpu_worker

    from vllm.diffusion.engine.worker.weight_worker import WeightWorker

    names = (
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update"),
        *("start_draft_weight_update", "update_weights", "finish_weight_update", "reset_weights"),
        *("compute_weight_checksums", "reload_weights", "supports_draft_weight_updates"),
        *("sleep", "wake_up", "discard", "shutdown"),
    )
    tree = ast.parse(inspect.getsource(gpu_worker))
    theirs = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert set(names) <= theirs
    assert all(name in vars(WeightWorker) for name in names)


def test_an_engine_tells_its_scheduler_the_label_of_the_weights(engine: Engine) -> None:
    engine.llm.update_weight_version("a label")
    assert engine.llm.get_weight_version() == "a label"
    assert list(engine.scheduler.labels.values()) == ["a label"]
    engine.llm.update_weight_version("default")


def test_a_sleep_that_is_refused_pauses_nothing(engine: Engine) -> None:
    for level, wanted in ((1, "--enable-sleep-mode"), (7, "0, 1 or 2")):
        with pytest.raises(ServerConfigError, match=f"sleep: given level {level}; wanted {wanted}"):
            engine.llm.sleep(level)
        assert not engine.core.is_scheduler_paused()


def test_the_engine_core_passes_the_scheduler_what_it_takes() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm.diffusion.engine.scheduler.scheduler import DiffusionScheduler

    upstream = set(inspect.signature(Scheduler.__init__).parameters)
    assert upstream <= set(inspect.signature(DiffusionScheduler.__init__).parameters)


def test_the_openai_handlers_have_the_steps_that_are_overridden() -> None:
    """Our overrides name the leading parameters and pass on the others."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    chat, completion = OpenAIServingChat, OpenAIServingCompletion
    for step, leading in (
        (chat.create_chat_completion, "request raw_request"),
        (chat.chat_completion_stream_generator, "request result_generator"),
        (
            chat.chat_completion_stream_generator_raw,
            "request result_generator request_id model_name",
        ),
        (chat.chat_completion_full_generator, "request result_generator"),
        (completion.create_completion, "request raw_request"),
        (
            completion.completion_stream_generator,
            "request engine_inputs result_generator request_id created_time",
        ),
        (completion.request_output_to_completion_response, "final_res_batch"),
    ):
        wanted = ["self", *leading.split()]
        assert list(inspect.signature(step).parameters)[: len(wanted)] == wanted, step


def test_every_front_end_makes_its_requests_in_one_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validator runs in `InputProcessor.process_inputs`, whose result owns its parameters."""
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine import llm_engine
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm import SamplingParams
    from vllm.diffusion.api import validator
    from vllm.diffusion.request.decision import is_decided

    assert validator.is_installed()
    assert "input_processor" in inspect.get_annotations(EngineClient)
    for front_end in (AsyncLLM, llm_engine.LLMEngine):
        source = inspect.getsource(front_end)
        assert "InputProcessor(self.vllm_config" in source
        assert ".input_processor.process_inputs" in source
    made = record(monkeypatch, InputProcessor, "process_inputs", lambda request, *_: request)
    own = SamplingParams(temperature=0.0, extra_args={"gen_length": 8, "steps": 1})
    engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 2, own, use_tqdm=False)
    assert len(made) == 2
    assert all(is_decided(request.sampling_params) for request in made)
    assert own.extra_args == {"gen_length": 8, "steps": 1}  # the caller's object is unchanged


def test_a_detokenizer_asks_for_its_stop_strings_behind_each_text(engine: Engine) -> None:
    """Stop strings end at a tool call: a text that is a call has none, whatever came first."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    from vllm import SamplingParams
    from vllm.diffusion.guided.guides import SPEC, packed, spec_of_tools
    from vllm.diffusion.guided.tool_grammar import Tools

    assert inspect.iscoroutinefunction(AsyncLLM.add_request)
    processor, tokenizer = engine.llm.llm_engine.input_processor, engine.llm.get_tokenizer()
    tools = packed(spec_of_tools(Tools({"f": {"type": "object"}}, may_answer=True)))
    for text, actual in (("<tool_call>", None), ("ab tool", "tool")):
        params = SamplingParams(stop=["tool"], extra_args={"gen_length": 96, SPEC: tools})
        prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
        request = processor.process_inputs("r", prompt, params, supported_tasks=("generate",))
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        assert detokenizer.update(tokenizer.encode(text, add_special_tokens=False), False) == actual


def test_a_request_that_fails_on_its_way_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that upstream registered, but could not send, is removed again."""
    from vllm.renderers.hf import HfRenderer
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm import SamplingParams

    for front_end, add in ((AsyncLLM, AsyncLLM.add_request), (LLMEngine, LLMEngine.add_request)):
        source = inspect.getsource(inspect.unwrap(add)) + inspect.getsource(front_end)
        checked, registered = "assign_request_id(request)", "output_processor.add_request("
        assert 0 <= source.index(checked) < source.index(registered, source.index(checked))
    assert isinstance(inspect.getattr_static(InputProcessor, "assign_request_id"), staticmethod)
    llm = engine.llm
    assert isinstance(llm.llm_engine.renderer, HfRenderer)
    assert type(llm.llm_engine.renderer).__module__.startswith("vllm.diffusion")
    prompt = {"prompt_token_ids": [1, 2, 3]}
    sampling = SamplingParams(temperature=0.0, extra_args={"gen_length": 8, "steps": 1})

    def fails(*_: object) -> None:
        raise RuntimeError("on its way")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.engine_core, "add_request", fails)
        with pytest.raises(RuntimeError, match="on its way"):
            llm.generate([prompt], sampling, use_tqdm=False)
    sampling.ignore_eos = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="ignore_eos: given nothing"):
        llm.generate([prompt, prompt], sampling, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    sampling.ignore_eos = True
    assert llm.generate([prompt], sampling, use_tqdm=False)[0].finished


def test_requests_and_outputs_have_the_fields_that_are_used() -> None:
    from vllm.v1.core.sched.output import CachedRequestData
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request, RequestStatus

    from vllm import SamplingParams

    for name in ("append_output_token_ids", "get_finished_reason", "take_prefill_stats"):
        assert callable(getattr(Request, name))
    assert RequestStatus.FINISHED_ERROR > RequestStatus.FINISHED_STOPPED
    used = {"kv_transfer_params", "new_logprobs", "new_token_ids", "finish_reason", "stop_reason"}
    assert used <= set(EngineCoreOutput.__struct_fields__)
    assert SamplingParams(extra_args={"a": [1]}).extra_args == {"a": [1]}
    assert {"outputs", "finished_requests", "scheduler_stats"} <= set(
        EngineCoreOutputs.__struct_fields__
    )
    assert CachedRequestData.make_empty() is not None
    assert SamplingParams().max_tokens == 16  # a default, not a limit that the caller set


@pytest.mark.parametrize(
    ("failed", "error"), [(False, VLLMValidationError), (True, GenerationError)]
)
def test_an_error_of_the_engine_is_raised_for_the_client(
    failed: bool, error: type[Exception], engine: Engine
) -> None:
    """Upstream's server raises `EngineCoreOutput.error`, for HTTP 400 or 500."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.request import Request as UpstreamRequest
    from vllm.v1.request import RequestStatus

    from vllm import SamplingParams

    inputs = engine.llm.llm_engine.input_processor
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    sent = inputs.process_inputs("r", prompt, SamplingParams(), supported_tasks=("generate",))
    inputs.assign_request_id(sent)
    processor = OutputProcessor(engine.llm.get_tokenizer(), log_stats=False)
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, sent.request_id)
    processor.add_request(sent, None, None, 0, collector)
    request = UpstreamRequest.from_engine_core_request(sent, None)
    request.status = RequestStatus.FINISHED_ERROR
    processor.process_outputs([refusal(request, "too large", failed)])
    with pytest.raises(error, match="too large"):
        collector.get_nowait()


def test_step_logs_name_time_requests_and_rows(engine: Engine) -> None:
    """Benchmarks read this log line."""
    from vllm.diffusion.engine.worker import step_log

    ask = Request(random_prompt(5), {"gen_length": 8, "steps": 2, "ignore_eos": True})
    lines = logged(step_log.logger, engine.ask, ask)
    steps = [text for _, text in lines if text.startswith("execute_diffusion_once time = ")]
    assert len(steps) == 2
    assert all(" ms, requests = 1, rows = 13" in text for text in steps)
    assert ", sampled = 8" in steps[0]


# ---- the list of docs/upstream.md --------------------------------------------------------------


def test_every_place_in_the_list_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, test in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {test}" in source, f"{file}::{test}"
    for file in re.findall(r"`(vllm/[\w/]+\.py)`", text):
        assert (ROOT / file).is_file(), file
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`vllm/" in line]
    assert all("`tests/" in row for row in rows)


def test_tables_that_are_written_to() -> None:
    from collections.abc import MutableMapping

    import vllm.envs
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.plugins import load_general_plugins
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    load_general_plugins()  # writes to them
    for table in (_CONFIG_REGISTRY, MODELS_CONFIG_MAP, vllm.envs.environment_variables):
        assert isinstance(table, MutableMapping)
    assert "llada" in _CONFIG_REGISTRY
    assert issubclass(MODELS_CONFIG_MAP["LLaDAModelLM"], VerifyAndUpdateConfig)
    assert all(callable(read) for read in vllm.envs.environment_variables.values())


def test_the_servers_client_has_what_is_replaced_and_called() -> None:
    """The constructor would start an engine, so its attributes are read from its source."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import StatLoggerManager

    assert "timeout" in inspect.signature(AsyncLLM.shutdown).parameters
    assert {"request_id", "internal"} <= set(inspect.signature(AsyncLLM.abort).parameters)
    made = inspect.getsource(AsyncLLM.__init__)
    for name in ("output_processor", "output_handler", "logger_manager"):
        assert f"self.{name}" in made
    assert callable(OutputProcessor.propagate_error)
    assert "self.request_states" in inspect.getsource(OutputProcessor.__init__)
    assert "self.stat_loggers" in inspect.getsource(StatLoggerManager.__init__)


def test_the_openai_handlers_take_another_class() -> None:
    """Python allows another class for an instance only if both classes have the same layout."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from vllm.diffusion.api.openai.openai_serving import (
        DiffusionServingChat,
        DiffusionServingCompletion,
    )

    for upstream, ours in (
        (OpenAIServingChat, DiffusionServingChat),
        (OpenAIServingCompletion, DiffusionServingCompletion),
    ):
        handler = object.__new__(upstream)
        handler.__class__ = ours
        assert isinstance(handler, ours)


def test_typed_decisions_have_what_is_overridden_and_called() -> None:
    """Upstream has a table of strategies, a client call per item, and steps of the handlers."""
    from vllm.entrypoints.generate.generative_scoring import serving as scoring
    from vllm.entrypoints.generate.structured_decisions import serving
    from vllm.entrypoints.openai.decisions import strategies
    from vllm.entrypoints.openai.decisions.serving import BaseServingDecisions

    from vllm.diffusion.api.likelihood.typed_decisions import DiffusionDecisions, DiffusionScoring

    assert isinstance(strategies.READ_STRATEGIES, dict)
    for name in ("_render", "_read_request", "_content", "_tokenizer"):
        assert callable(getattr(strategies.NextTokenStrategy, name))
    for upstream, ours, step in (
        (serving.ServingStructuredDecisions, DiffusionDecisions, "create_decision"),
        (scoring.ServingGenerativeScoring, DiffusionScoring, "create_generative_scoring"),
    ):
        handler = object.__new__(upstream)
        handler.__class__ = ours
        wanted = ["self", "request", "raw_request"]
        assert list(inspect.signature(getattr(upstream, step)).parameters) == wanted
    steps = inspect.getsource(serving.ServingStructuredDecisions.create_decision)
    assert "self.strategy.read_joint if joint else self.strategy.read" in steps
    assert "self.strategy.num_requests(questions, joint=" in inspect.getsource(BaseServingDecisions)
    assert {"canvas", "width", "position"} <= set(inspect.get_annotations(strategies.JointSlot))
    source = inspect.getsource(scoring.ServingGenerativeScoring.create_generative_scoring)
    assert "next_token_label_reads(\n                self.engine_client" in source


def test_an_echo_asks_for_the_prompts_probabilities() -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = CompletionRequest(prompt="a", echo=True, logprobs=2, max_tokens=0)
    sampling = body.to_sampling_params(0, {})
    assert (sampling.prompt_logprobs, sampling.max_tokens) == (2, 1)


def test_an_application_has_a_stack_to_stand_before() -> None:
    from fastapi import FastAPI

    app = FastAPI()
    assert app.middleware_stack is None  # we build it, or FastAPI does at the first request
    assert callable(app.build_middleware_stack())


def test_arguments_that_are_set_are_upstreams() -> None:
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actual = vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))
    assert actual.keys() >= {
        *("disable_uvicorn_access_log", "disable_access_log_for_endpoints", "shutdown_timeout"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    }


def test_loaders_empty_the_accelerators_cache() -> None:
    """If loaders stop calling it, or the call stops raising, our replacement is obsolete.

    A CUDA build of torch does not raise, with or without a GPU.
    """
    from vllm.model_executor.model_loader import base_loader

    assert "torch.accelerator.empty_cache()" in inspect.getsource(base_loader)
    if torch.version.cuda is None:
        code = "import torch; torch.accelerator.empty_cache()"
        assert run_python("-c", code).returncode != 0


def test_layers_can_be_kept_as_they_were_loaded() -> None:
    from vllm.model_executor.layers import linear, vocab_parallel_embedding
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    assert linear.LinearBase and vocab_parallel_embedding.VocabParallelEmbedding
    assert callable(UnquantizedEmbeddingMethod.process_weights_after_loading)
    folder = Path(inspect.getfile(linear)).parents[1]
    readers = [f for f in folder.rglob("*.py") if "_cpu_skip_gemm_dispatch" in f.read_text()]
    assert readers, "nothing reads it any more"


def test_streams_have_chunks_that_can_be_changed() -> None:
    """Chats make chunks, which another generator writes; completions write texts."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from vllm.diffusion.api.streams import DONE

    written = inspect.getsource(OpenAIServingChat.chat_completion_stream_generator)
    assert "in self.chat_completion_stream_generator_raw(" in written
    raw = inspect.getsource(OpenAIServingChat.chat_completion_stream_generator_raw)
    assert "model_dump_json" not in raw and "DONE" not in raw
    chunk = ChatCompletionStreamResponse(model="a", choices=[])
    chunk.diffusion = {"none": None}  # type: ignore[attr-defined]
    content = json.loads(chunk.model_dump_json(exclude_unset=True, exclude_none=True))
    assert content["diffusion"] == {"none": None}
    texts = inspect.getsource(OpenAIServingCompletion.completion_stream_generator)
    assert f"yield {json.dumps(DONE)}" in texts


def test_messages_are_converted_from_the_chunks_of_a_chat() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    from vllm.diffusion.api.openai.anthropic import DiffusionServingMessages

    converted = inspect.getsource(AnthropicServingMessages.chat_completion_stream_generator)
    assert "self.message_stream_converter(" in converted
    assert "self.chat_completion_stream_generator_raw(" in converted
    order = [c.__name__ for c in DiffusionServingMessages.__mro__]
    chat, messages = order.index("DiffusionServingChat"), order.index("AnthropicServingMessages")
    assert chat < messages < order.index("OpenAIServingChat")


def test_processes_of_an_engine_have_the_names_that_are_watched() -> None:
    from vllm.v1 import utils
    from vllm.v1.engine import utils as engine_utils
    from vllm.v1.executor import multiproc_executor

    from vllm.diffusion.process.watchdog import _PROCESS_NAMES

    for module, name in (
        (engine_utils, 'else "EngineCore"'),
        (engine_utils, 'f"EngineCore_DP{'),
        (multiproc_executor, 'f"VllmWorker-{'),
        (utils, 'f"ApiServer_{'),
    ):
        assert name in inspect.getsource(module)
        assert name.partition('"')[2].startswith(_PROCESS_NAMES)


def test_an_engines_process_comes_from_one_context() -> None:
    """`vllm.diffusion.process.prestart` replaces that context."""
    from vllm.v1.engine import utils

    source = inspect.getsource(utils.CoreEngineProcManager.__init__)
    assert "context = get_mp_context()" in source
    assert "context.Process(" in source
    assert "get_mp_context" in vars(utils)


def test_what_is_imported_early_is_there() -> None:
    from vllm.diffusion.process import prestart as early

    for name in early.NEEDED + early._ROUTES:
        assert importlib.util.find_spec(name) is not None, name


def test_our_classes_are_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our model classes are inspected here, without a process that would import everything."""
    from vllm.model_executor.models import ModelRegistry, registry

    from vllm.diffusion.plugin import register

    register()
    monkeypatch.setattr(registry, "_run_in_subprocess", None)
    actual = ModelRegistry.models["LLaDAModelLM"].inspect_model_cls()
    assert (actual.architecture, actual.is_text_generation_model) == ("UpstreamModel", True)


def test_upstream_brings_a_swagger_ui_that_knows_openapi_3_1() -> None:
    from vllm.diffusion.api.documentation.offline_docs import SWAGGER_UI

    library = (SWAGGER_UI / "swagger-ui-bundle.js").read_text(encoding="utf-8")
    version = re.search(r'PACKAGE_VERSION:"(\d+)\.', library)
    assert version is not None
    assert int(version[1]) >= 5  # the first major version that supports OpenAPI 3.1
    assert (SWAGGER_UI / "swagger-ui.css").stat().st_size > 10_000

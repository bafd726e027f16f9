# SPDX-License-Identifier: Apache-2.0
"""Configuration of an engine: settings that are fixed before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import envs as upstream_envs
from vllm import platforms
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.diffusion.adapters.draft_adapter import DraftAdapter, draft_adapter_in
from vllm.diffusion.adapters.lora_flags import SlotSizes, check_flags, slot_sizes
from vllm.diffusion.core import envs
from vllm.diffusion.core.errors import (
    InvalidParameterError,
    ModelConfigError,
    ServerConfigError,
)
from vllm.diffusion.core.quantisation import Fp8Scheme, scheme_of
from vllm.diffusion.guided.guides import Guides
from vllm.diffusion.guided.language import Ends
from vllm.diffusion.guided.vocabulary import vocabulary_of
from vllm.diffusion.process import log_filter
from vllm.diffusion.request import families
from vllm.diffusion.request.fields import canonical, near_miss, server_defaults
from vllm.diffusion.request.served_model import NO_MASK, ServedModel, SpecialIds
from vllm.tokenizers.registry import cached_tokenizer_from_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.config import ModelConfig, VllmConfig
    from vllm.diffusion.request.families import Family

WORKER = "vllm.diffusion.engine.worker.worker.DiffusionWorker"
# line ends in plain text, in byte-level BPE, and as a single byte
_LINE_END = ("\n", "\u010a", "<0x0A>")
SCHEDULER = "vllm.diffusion.engine.scheduler.scheduler.DiffusionScheduler"
ADAPTING_SCHEDULER = "vllm.diffusion.engine.scheduler.adapting_scheduler.AdaptingScheduler"
_SAMPLER = "EntropyBoundSamplerConfig"  # the supported sampler_config of generation_config.json
TRANSFERS = ("nccl", "ipc", "disk")  # ways to transfer weights while the server runs
EXECUTOR = "vllm.diffusion.engine.executor.RanksExecutor"
# Drafts per forward pass on a GPU, where the engine weighs them by measured times.
DEFAULT_NUM_DRAFTS = 7


def configure(vllm_config: VllmConfig) -> None:
    """Adapt upstream's configuration so that it runs a diffusion language model.

    Raises:
        ServerConfigError: a setting has no meaning for these models.
    """
    log_filter.drop_irrelevant_lines()
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ServerConfigError(
            f"pipeline_parallel_size: given {parallel.pipeline_parallel_size}; wanted 1: "
            "diffusion language models run tensor and data parallel"
        )
    if vllm_config.speculative_config is not None:
        raise ServerConfigError(
            "speculative_config: wanted none; a diffusion language model drafts its own states: "
            'additional_config={"dllm": {"num_speculative_states": 7}}'
        )
    if upstream_envs.VLLM_BATCH_INVARIANT:
        settings = server_settings(vllm_config.additional_config) | {"batch_invariant": True}
        vllm_config.additional_config = {**vllm_config.additional_config, "dllm": settings}
    mode = vllm_config.model_config.logprobs_mode
    if mode.endswith("logits"):
        raise ServerConfigError(
            f"logprobs_mode: given {mode!r}; wanted raw_logprobs: steps report log probabilities"
        )
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKER
    # It is stored, because upstream sets the number of replicas to 1 in their own processes.
    replicas = {"num_replicas": max(parallel.data_parallel_size_local, 1)}
    vllm_config.additional_config = replicas | vllm_config.additional_config
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        has_adapters = vllm_config.lora_config is not None
        scheduler.scheduler_cls = ADAPTING_SCHEDULER if has_adapters else SCHEDULER
    scheduler.async_scheduling = False
    scheduler.enable_chunked_prefill = False
    family = family_of(vllm_config)
    # Without block-causal attention, keys depend on later tokens.
    if family is None or not family.is_block_causal:
        vllm_config.cache_config.enable_prefix_caching = False
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    check_settings(server_settings(vllm_config.additional_config), family_of(vllm_config))
    _check_tensor_parallel(vllm_config)
    _check_open(vllm_config)
    _check_transfer(vllm_config)
    _divide_rows(vllm_config)
    check_flags(vllm_config)
    slots = slots_of(vllm_config)
    if slots is not None and slots.draft is not None:
        # Refuses the adapter before the engine's process starts.
        slots.draft.check(vllm_config.model_config.hf_config)
    if settings_of(vllm_config).batch_invariant:
        _check_invariant(vllm_config)

    # Our worker uses neither of upstream's runners; the second would warn about a missing Triton.
    envs.set_default("VLLM_USE_V2_MODEL_RUNNER", "0")
    _set_defaults(vllm_config.model_config, family)


def _set_defaults(model: ModelConfig, family: Family | None) -> None:
    """Change the defaults of requests that upstream takes from generation_config.json."""
    for name in _unused_defaults(model):
        model.override_generation_config.setdefault(name, 1.0)
    if family is not None and family.is_open:
        # The length of a canvas in the authors' loop; upstream would limit every answer to it.
        model.override_generation_config.setdefault("max_new_tokens", None)
    if "temperature" not in model.try_get_generation_config():
        # Upstream's HTTP default would be 1, but most model authors use 0.
        default = 0.0 if family is None else family.defaults.get("temperature", 0.0)
        model.override_generation_config.setdefault("temperature", default)


def _unused_defaults(model: ModelConfig) -> tuple[str, ...]:
    """Return sampling defaults of generation_config.json that the model authors' decoding ignores.

    Values from `--override-generation-config` are deliberate and are not ignored.
    """
    name = "repetition_penalty"
    is_written = model.try_get_generation_config().get(name, 1) != 1
    is_meant = model.override_generation_config.get(name, 1) != 1
    return (name,) if is_written and not is_meant else ()


def _check_transfer(vllm_config: VllmConfig) -> None:
    """Refuse a weight transfer that does not write into this model's tensors."""
    transfer = vllm_config.weight_transfer_config
    if transfer is None or transfer.backend in TRANSFERS:
        return
    raise ServerConfigError(
        f"weight_transfer_config: backend: given {transfer.backend!r}; wanted one of "
        f"{', '.join(TRANSFERS)}"
    )


def _check_tensor_parallel(vllm_config: VllmConfig) -> None:
    """Refuse a tensor-parallel size that does not divide the model; upstream checks query heads."""
    size = vllm_config.parallel_config.tensor_parallel_size
    if size == 1 or family_of(vllm_config) is None:
        return
    config = vllm_config.model_config.hf_config
    architecture, heads = config.architecture, config.num_key_value_heads
    if heads % size and size % heads:
        raise ServerConfigError(
            f"tensor_parallel_size: given {size}; wanted a divisor or a multiple of the {heads} "
            "key/value heads"
        )
    widths = {
        "the MLP's": architecture.dense_width,
        "the experts'": architecture.expert_width,
        "the shared expert's": architecture.shared_expert_width,
    }
    for name, width in widths.items():
        if width % size:
            raise ServerConfigError(
                f"tensor_parallel_size: given {size}; wanted a divisor of {name} width {width}"
            )


def _check_open(vllm_config: VllmConfig) -> None:
    """Refuse settings that the family without a mask token does not support yet."""
    family = family_of(vllm_config)
    if family is None or not family.is_open:
        return
    model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    heads = model.hf_config.num_global_key_value_heads
    if heads % num_ranks:
        wanted = f"a divisor of num_global_key_value_heads {heads}"
        raise ServerConfigError(f"tensor_parallel_size: given {num_ranks}; wanted {wanted}")
    if model.quantization not in (None, "fp8"):
        raise ServerConfigError(
            f"quantization: given {model.quantization}; "
            f"wanted none or fp8 for a model of family {family.name}"
        )
    if vllm_config.lora_config is not None:
        raise ServerConfigError(
            f"enable_lora: given True; wanted False for a model of family {family.name}"
        )


def _check_invariant(vllm_config: VllmConfig) -> None:
    """Refuse settings with which a row's rounding may depend on other rows."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    settings, family = settings_of(vllm_config), family_of(vllm_config)
    is_on_gpu = vllm_config.device_config.device_type == "cuda"
    dtype, capability = str(model.dtype).removeprefix("torch."), (9, 0)
    if is_on_gpu:
        version = envs.kernels() or platforms.current_platform.get_device_capability()
        capability = tuple(version or (0, 0))
    architecture = model.hf_config.architecture
    has_experts = bool(architecture.expert_layers)
    fp8 = server_settings(vllm_config.additional_config).get("attention_dtype")
    scheme = scheme_of(model.quantization, getattr(model.hf_config, "quantization_config", None))
    is_known = model.quantization is None or isinstance(scheme, Fp8Scheme)
    refused = (
        (not is_known, f"quantization {model.quantization}", "none or fp8"),
        (fp8 == "fp8", "attention_dtype fp8", "model"),
        (vllm_config.lora_config is not None, "LoRA adapters", "none"),
        (family is not None and family.is_open, "a model without a mask token", "another model"),
        (is_on_gpu and dtype != "bfloat16", f"dtype {dtype}", "bfloat16"),
        (
            capability != (9, 0),
            f"a GPU of compute capability {'.'.join(map(str, capability))}",
            "9.0",
        ),
        (not is_on_gpu and has_experts, "experts on the CPU", "a dense model, or a GPU"),
        (parallel.nnodes > 1, f"{parallel.nnodes} hosts", "1"),
        (
            parallel.tensor_parallel_size > 1 and architecture.norms_all_heads,
            "tensor_parallel_size above 1 and norms over all heads",
            "1, or another model",
        ),
        (settings.sequence_parallel_size > 1, "sequence_parallel_size above 1", "1"),
    )
    for is_refused, given, wanted in refused:
        if is_refused:
            raise ServerConfigError(f"batch_invariant: given with {given}; wanted {wanted}")


def _divide_rows(vllm_config: VllmConfig) -> None:
    """Make upstream start a process for every rank, including sequence-parallel ranks."""
    size, parallel = settings_of(vllm_config).sequence_parallel_size, vllm_config.parallel_config
    if size == 1:
        return
    wanted = _why_not_divided(vllm_config, size)
    if wanted is not None:
        raise ServerConfigError(f"sequence_parallel_size: given {size}; wanted {wanted}")
    parallel.world_size = parallel.tensor_parallel_size * size
    parallel.distributed_executor_backend = EXECUTOR


def _why_not_divided(vllm_config: VllmConfig, size: int) -> str | None:
    """Return the requirement that `size` sequence-parallel ranks violate, or None."""
    parallel, config = vllm_config.parallel_config, vllm_config.model_config.hf_config
    family = family_of(vllm_config)
    if family is not None and family.is_block_causal:
        return f"1: {config.architectures[0]} is block-causal, whose steps are short"
    if parallel.distributed_executor_backend not in (None, "uni", "mp", EXECUTOR):
        return f"1 with distributed_executor_backend {parallel.distributed_executor_backend}"
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = max(getattr(config, name) // parallel.tensor_parallel_size, 1)
        if heads % size:
            return f"a divisor of the {heads} heads of a rank ({name})"
    num_ranks = size * parallel.tensor_parallel_size
    platform = platforms.current_platform
    if platform.is_cuda() and parallel.nnodes == 1 and num_ranks > platform.device_count():
        return f"no more ranks than GPUs: {num_ranks} ranks, {platform.device_count()} GPUs"
    return None


def family_of(vllm_config: VllmConfig) -> Family | None:
    """Return the family of the configured model, or None if Mosaic does not serve it."""
    config = vllm_config.model_config.hf_config
    return families.family_of(config.architectures, config.model_type, vars(config))


def slots_of(vllm_config: VllmConfig) -> SlotSizes | None:
    """Return the sizes of the slots for adapters; None in an engine without adapters.

    Raises:
        ServerConfigError: the adapter for drafts cannot be used.
    """
    family, given = family_of(vllm_config), settings_of(vllm_config).draft_adapter
    folder = None if family is None else family.draft_folder
    if given is not None and folder is None:
        name = "of another family" if family is None else f"of family {family.name}"
        wanted = f"wanted none: a model {name} makes no drafts"
        raise ServerConfigError(f"draft_adapter: given {given!r}; {wanted}")
    draft = None if given is None else DraftAdapter(given)
    if draft is None and folder is not None:
        model = vllm_config.model_config
        draft = draft_adapter_in(model.model, folder, model.revision)
    return slot_sizes(vllm_config, draft)


def served_model(vllm_config: VllmConfig) -> ServedModel:
    """Return the facts about the model on which decisions about requests depend."""
    model = vllm_config.model_config
    config = model.hf_config
    family = family_of(vllm_config)
    if family is None:
        raise ModelConfigError(
            "architectures", config.architectures, f"wanted one of {sorted(families.ARCHITECTURES)}"
        )
    generation = model.try_get_generation_config() | model.override_generation_config
    ids = _special_ids(model, generation, family)
    vocab_size = config.architecture.num_embeddings
    encode = None if model.skip_tokenizer_init else partial(_encode, model)
    slots = slots_of(vllm_config)
    settings, is_on_gpu = settings_of(vllm_config), vllm_config.device_config.device_type == "cuda"
    defaults = {"num_speculative_states": DEFAULT_NUM_DRAFTS} if is_on_gpu else {}
    if family.is_open:
        # Drafts of the end of a canvas were not measured on a GPU.
        defaults = {"num_speculative_states": 0} | _schedule_of(generation)
    return ServedModel(
        family=family,
        ids=ids,
        max_model_len=model.max_model_len,
        vocab_size=vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        unused_defaults=_unused_defaults(model),
        default_max_tokens=None if family.is_open else generation.get("max_new_tokens"),
        default_gen_length=settings.default_gen_length,
        defaults=defaults | check_settings(server_settings(vllm_config.additional_config), family),
        default_steps=envs.default_steps(),
        block_length=getattr(config, "block_length", None),
        block_unit=max(config.architecture.scoring.window, 1),
        fp8_from=settings.fp8_attention_min_tokens,
        cuts_steps=settings.longest_pause_ms > 0,
        has_draft_adapter=slots is not None and slots.draft is not None,
        guides=None if encode is None else _guides(model, ids, vocab_size, encode),
        encode=encode,
        spans=None if encode is None else partial(_spans, model),
    )


def _schedule_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of requests that generation_config.json sets for an open canvas.

    Raises:
        ServerConfigError: the checkpoint requires another sampler, or a value is unusable.
    """
    sampler = generation.get("sampler_config") or {}
    kind = sampler.get("_cls_name", _SAMPLER) if isinstance(sampler, dict) else sampler
    if kind != _SAMPLER:
        raise ServerConfigError(
            f"generation_config.json: sampler_config: given {kind!r}; wanted {_SAMPLER}"
        )
    names = ("t_min", "t_max", "stability_threshold", "confidence_threshold")
    given = {
        "steps_per_block": generation.get("max_denoising_steps"),
        "entropy_bound": sampler.get("entropy_bound"),
        **{name: generation.get(name) for name in names},
    }
    try:
        return canonical(given)
    except InvalidParameterError as error:
        raise ServerConfigError(f"generation_config.json: {error}") from None


def _spans(model: ModelConfig, text: str) -> Sequence[tuple[int, int]]:
    """Return the first character and last + 1 of the tokens of `_encode`.

    A space that a token begins with counts as a part of it.

    Raises:
        InvalidParameterError: the tokenizer does not report characters.
    """
    tokenizer = cached_tokenizer_from_config(model)
    if not getattr(tokenizer, "is_fast", False):
        wanted = "wanted canvas_token_ids: this tokenizer does not report the characters of a token"
        raise InvalidParameterError("canvas_text", text, wanted)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, end = list[tuple[int, int]](), 0
    for start, stop in offsets["offset_mapping"]:
        spans.append((min(start, end), stop))
        end = stop
    return spans


def _encode(model: ModelConfig, text: str) -> Sequence[int]:
    """Return a text's token ids without special tokens; the tokenizer is loaded at first use."""
    return list(cached_tokenizer_from_config(model).encode(text, add_special_tokens=False))


def _guides(
    model: ModelConfig,
    ids: SpecialIds,
    vocab_size: int,
    encode: Callable[[str], Sequence[int]],
) -> Guides:
    """Return the compiler of answer formats; it loads the checkpoint's vocabulary at first use."""
    others = () if ids.eot in (None, ids.eos) else (ids.eot,)
    return Guides(
        lambda: vocabulary_of(cached_tokenizer_from_config(model), vocab_size),
        None if ids.eos is None else Ends(ids.eos, others),
        encode,
    )


def row_budget(vllm_config: VllmConfig) -> int:
    """Return the rows that several requests may share in one step; a lone request may have more.

    The value is upstream's `max_num_batched_tokens`. Its default is 8,192 for a server on a large
    GPU, where each row costs the same from about 1,000 rows on, so a larger value would only make
    steps longer. On smaller machines it is 2,048.
    """
    return int(vllm_config.scheduler_config.max_num_batched_tokens)


def server_settings(additional_config: Any) -> dict[str, Any]:
    """Return the `dllm` part of upstream's `additional_config`, unchecked.

    Raises:
        ServerConfigError: it is not a JSON object, or its name is misspelt.
    """
    for name in additional_config if isinstance(additional_config, dict) else ():
        if name != "dllm" and near_miss(name, ("dllm",)):
            raise ServerConfigError(f"additional_config: given {name!r}; did you mean 'dllm'?")
    settings = additional_config.get("dllm", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(settings, dict):
        raise ServerConfigError(f"additional_config.dllm: given {settings!r}; wanted a JSON object")
    return settings


@dataclass(frozen=True)
class Settings:
    """The `dllm` settings of an engine and its server that are not defaults of requests.

    Attributes:
        long_share: share of the time for long requests while short ones run
            (`engine/scheduler/long_step_policy.py`).
        longest_pause_ms: maximum pause of a short request in ms; 0 is unlimited, so that no step is
            divided.
        sequence_parallel_size: ranks that divide the rows of a long step; 1 divides nothing.
        sequence_parallel_min_tokens: rows of a step from which they do; None chooses the number
            from which it pays.
        weighs_guesses: whether states are drafted only while they save time
            (`engine/speculation/budget.py`), or else always as many as requests allow; None weighs
            them on a GPU.
        page: whether the server has its web pages.
        fp8_head: whether the output head is quantised, too.
        fp8_attention_min_tokens: length in positions from which attention is fp8, in requests with
            `attention_dtype: fp8`.
        default_gen_length: first length of the canvas of requests that only set a larger
            `max_tokens`, in full-attention families; None takes `max_new_tokens` of
            generation_config.json, but at most 256.
        family: the only family whose checkpoints are accepted; None accepts all.
        weight_update_root: folder below which updates by `disk` may read; None allows no such
            updates.
        adapter_root: folder below which adapters may be loaded at run time; None allows any.
        draft_adapter: folder, or name on the Hub, of the adapter for drafts; None takes that in the
            checkpoint's folder, if there is one.
        weight_update_complete: whether an update must contain every tensor.
        decisions_joint: whether the questions of a call of `/v1/decisions` share a sequence unless
            the request sets `joint`, in full-attention families.
        decisions_least_mass: probability of all labels of a question below which it is answered
            with a refusal; 0 refuses none.
        decision_calibration: path of a calibration file for `/v1/decisions`.
        batch_invariant: whether an answer has the same bits alone and next to other requests
            (docs/batch_invariance.md).
    """

    long_share: float = 0.5
    longest_pause_ms: float = 100.0
    sequence_parallel_size: int = 1
    sequence_parallel_min_tokens: int | None = None
    weighs_guesses: bool | None = None
    page: bool = True
    fp8_head: bool = False
    fp8_attention_min_tokens: int = 8192
    default_gen_length: int | None = None
    family: str | None = None
    weight_update_root: str | None = None
    adapter_root: str | None = None
    draft_adapter: str | None = None
    weight_update_complete: bool = False
    decisions_joint: bool = True
    decisions_least_mass: float = 0.0
    decision_calibration: str | None = None
    batch_invariant: bool = False

    @property
    def longest_pause_s(self) -> float:
        return self.longest_pause_ms / 1000

    @property
    def sharing(self) -> str:
        """How long and short requests share the device, as text for the log."""
        if not self.longest_pause_ms:
            return "no step runs in slices (longest_pause_ms 0)"
        return (
            f"steps above {self.longest_pause_ms:g} ms run in slices (longest_pause_ms), which get "
            f"{self.long_share:g} of the time while other requests run (long_share)"
        )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Settings:
        """Return the engine's settings among all settings of a server.

        Raises:
            ServerConfigError: naming the setting, the given and the expected value.
        """
        parsed = cls(**{name: settings[name] for name in _OF_THE_ENGINE if name in settings})
        _check_number("long_share", parsed.long_share, 0, 0.95)
        if parsed.longest_pause_ms is False or parsed.longest_pause_ms != 0:
            _check_number("longest_pause_ms", parsed.longest_pause_ms, 1, 60_000, "0 or ")
        _check_count("sequence_parallel_size", parsed.sequence_parallel_size, 1)
        _check_count("fp8_attention_min_tokens", parsed.fp8_attention_min_tokens, 1)
        if parsed.default_gen_length is not None:
            _check_count("default_gen_length", parsed.default_gen_length, 1)
        if parsed.sequence_parallel_min_tokens is not None:
            _check_count("sequence_parallel_min_tokens", parsed.sequence_parallel_min_tokens, 0)
        _check_number("decisions_least_mass", parsed.decisions_least_mass, 0, 1)
        for name in ("decision_calibration", "draft_adapter"):
            path = getattr(parsed, name)
            if path is not None and not (isinstance(path, str) and path):
                raise ServerConfigError(f"dllm settings: {name}: given {path!r}; wanted a path")
        for name in _FLAGS:
            given = getattr(parsed, name)
            if not isinstance(given, bool) and (name != "weighs_guesses" or given is not None):
                raise ServerConfigError(
                    f"dllm settings: {name}: given {given!r}; wanted true or false"
                )
        for name in ("weight_update_root", "adapter_root"):
            root = getattr(parsed, name)
            if root is not None and not (isinstance(root, str) and os.path.isdir(root)):
                raise ServerConfigError(f"dllm settings: {name}: given {root!r}; wanted a folder")
        if parsed.family not in (None, *families.SERVED_AS):
            raise ServerConfigError(
                f"dllm settings: family: given {parsed.family!r}; wanted one of "
                f"{', '.join(families.SERVED_AS)}"
            )
        return parsed


_FLAGS = (
    *("page", "fp8_head", "weight_update_complete", "decisions_joint", "weighs_guesses"),
    "batch_invariant",
)
_OF_THE_ENGINE = tuple(field.name for field in fields(Settings))


def num_replicas(vllm_config: VllmConfig) -> int:
    """Return the number of engines of this server that share the memory of this host."""
    return int(vllm_config.additional_config.get("num_replicas", 1))


def settings_of(vllm_config: VllmConfig) -> Settings:
    """Return the settings of an engine."""
    return Settings.of(server_settings(vllm_config.additional_config))


def _check_number(name: str, value: Any, minimum: float, maximum: float, also: str = "") -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not minimum <= value <= maximum:
        raise ServerConfigError(
            f"dllm settings: {name}: given {value!r}; "
            f"wanted {also}a number from {minimum} to {maximum}"
        )


def _check_count(name: str, value: Any, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ServerConfigError(
            f"dllm settings: {name}: given {value!r}; wanted a whole number from {minimum} on"
        )


def check_settings(settings: Mapping[str, Any], family: Family | None) -> dict[str, Any]:
    """Check all settings of the server; return the defaults of requests among them."""
    Settings.of(settings)
    remaining = {name: value for name, value in settings.items() if name not in _OF_THE_ENGINE}
    return server_defaults(remaining, family, _OF_THE_ENGINE)


def _special_ids(model: ModelConfig, generation: dict[str, Any], family: Family) -> SpecialIds:
    tokenizer = None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)
    config, vocabulary = model.hf_config, {} if tokenizer is None else tokenizer.get_vocab()
    named = vocabulary.get(family.mask_token or "")
    mask = NO_MASK if family.is_open else _mask_id(config, tokenizer, named)
    absent = [name for name in family.think_tokens if name not in vocabulary]
    eot = next((vocabulary[name] for name in family.end_of_turn_tokens if name in vocabulary), None)
    # The value of config.json comes first, the default of the family's class last.
    listed = _as_list(vars(config).get("eos_token_id"))
    listed += _as_list(generation.get("eos_token_id"))
    listed = listed or _as_list(getattr(tokenizer, "eos_token_id", None))
    listed = listed or _as_list(getattr(config, "eos_token_id", None))
    eos = next(iter(listed), None)
    stop = frozenset([*listed, *_as_list(eot)])
    pad = getattr(config, "pad_token_id", None)
    return SpecialIds(
        mask=mask,
        eos=eos,
        eot=eot,
        stop=stop,
        edit=tuple(getattr(config, key) for key in family.edit_tokens),
        think=() if absent else tuple(vocabulary[name] for name in family.think_tokens),
        no_think=absent[0] if len(absent) == 1 else None,
        line_ends=tuple(sorted(i for token, i in vocabulary.items() if token.endswith(_LINE_END))),
        pad=pad if pad in stop else eos,
    )


def _mask_id(config: Any, tokenizer: Any, named: int | None) -> int:
    """Return the mask token of config.json, else the tokenizer's, else that of a known name."""
    places = (
        ("config.json: mask_token_id", getattr(config, "mask_token_id", None)),
        ("the tokenizer's mask_token", getattr(tokenizer, "mask_token_id", None)),
        ("the tokenizer's mask token", named),
    )
    place, mask = next((pair for pair in places if pair[1] is not None), (None, None))
    if mask is None:
        wanted = "wanted the id of the mask token, there or as the tokenizer's mask_token"
        raise ModelConfigError("mask_token_id", None, wanted)
    size = config.architecture.num_embeddings
    if not 0 <= mask < size:
        raise ModelConfigError(
            "mask_token_id", mask, f"that is {place}; wanted an id below {size}, the vocabulary's"
        )
    return int(mask)


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)

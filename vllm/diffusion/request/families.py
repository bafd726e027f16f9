# SPDX-License-Identifier: Apache-2.0
"""Families of diffusion language models as data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.diffusion.request.causal_context import CausalContext
from vllm.diffusion.request.visibility import FULL, BlockCausal, Visibility

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Family:
    """Facts that hold for every checkpoint of one family.

    Attributes:
        name: short name that users write.
        architectures: values of `architectures` in config.json that load as this family.
        model_types: values of `model_type` in config.json of the family's releases; they
            distinguish families with the same architecture.
        config_class: "module:Class" of its configuration.
        default_algorithm: decoding algorithm of a request that names none.
        defaults: defaults of request parameters that differ from the algorithm's. A threshold
            applies only to the default algorithm.
        caps_steps: whether the answer's length limits the steps of a block (LLaDA2.0).
        scores_after_filters: in block-causal families, whether a candidate's confidence is its
            probability among the tokens that top_k and top_p keep, or else among all tokens.
        scores_clean: in block-causal families, whether a candidate's confidence is its probability
            at temperature 1, whatever the temperature at which it is drawn.
        counts_masks: in block-causal families, whether a quota is a share of the masked positions
            that a block has when it begins, instead of a share of its length. If so,
            `low_confidence_dynamic` commits candidates that reach the threshold, and always the
            best one.
        logit_shift: 1 if row i - 1 predicts the token at position i, else 0.
        visibility: which positions attend to which.
        block_grids: values of `block_grid`, the default first. With "start" blocks are counted from
            position 0, with "answer" from the end of the prompt.
        end_of_turn_tokens: names, in order of preference, of the token that ends a turn; for
            families whose answers end there even if generation_config.json does not list it.
        mask_token: name of the mask token if neither config.json nor the tokenizer defines it.
        served_as: its name for `--family` and for its server script; None if it has no script.
        marks: keys of config.json that are set only in the family's checkpoints, for families that
            architecture and model type do not distinguish.
        edit_tokens: keys of config.json with the ids of the tokens that delete and insert a
            position; only the algorithm `levenshtein` may propose them.
        think_tokens: names of the tokens that begin and end thinking, in families whose thinking
            `thinking_token_budget` can limit.
        draft_folder: folder of a checkpoint with the adapter for drafts; None for families without
            drafts.
        model_class: "module:Class" of its model.
        template_arguments: arguments of the chat template that a request may override.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config_class: str
    default_algorithm: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    caps_steps: bool = False
    scores_after_filters: bool = False
    scores_clean: bool = False
    counts_masks: bool = False
    logit_shift: int = 0
    visibility: Visibility = FULL
    block_grids: tuple[str, ...] = ("start",)
    end_of_turn_tokens: tuple[str, ...] = ()
    mask_token: str | None = None
    served_as: str | None = None
    marks: tuple[str, ...] = ()
    edit_tokens: tuple[str, ...] = ()
    think_tokens: tuple[str, ...] = ()
    draft_folder: str | None = None
    model_class: str = "vllm.diffusion.models.upstream_model:UpstreamModel"
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_block_causal(self) -> bool:
        """Whether a position attends only to its own block and the blocks before it."""
        return self.visibility.block_length > 0

    @property
    def has_causal_context(self) -> bool:
        """Whether the prompt and finished blocks are read causally."""
        return isinstance(self.visibility, CausalContext)

    @property
    def is_strictly_causal(self) -> bool:
        """Whether every position attends to earlier positions only."""
        return isinstance(self.visibility, CausalContext) and self.visibility.is_strict

    @property
    def is_open(self) -> bool:
        """Whether a canvas has no mask token: it begins as noise, and all of it may change."""
        return isinstance(self.visibility, CausalContext) and self.visibility.is_open


LLADA = Family(
    name="llada",
    served_as="llada",
    architectures=("LLaDAModelLM", "LLaDAForDiffusionLM"),
    model_types=("llada",),
    config_class="vllm.diffusion.models.llada:LLaDAConfig",
    default_algorithm="semi_ar",
    end_of_turn_tokens=("<|eot_id|>", "<|im_end|>", "<|role_end|>"),
)

DREAM = Family(
    name="dream",
    served_as="dream",
    architectures=("DreamModel", "DreamForDiffusionLM"),
    model_types=("Dream",),
    config_class="vllm.diffusion.models.dream:DreamConfig",
    default_algorithm="dream",
    logit_shift=1,
    end_of_turn_tokens=("<|im_end|>",),
)

LLADA_MOE = Family(
    name="llada-moe",
    served_as="llada-moe",
    architectures=("LLaDAMoEModelLM", "LLaDAMoEForDiffusionLM"),
    model_types=("lladamoe", "dllm", "llada"),
    config_class="vllm.diffusion.models.llada_moe:LLaDAMoEConfig",
    default_algorithm="semi_ar",
    end_of_turn_tokens=("<|role_end|>",),
)

SDAR = Family(
    name="sdar",
    served_as="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    config_class="vllm.diffusion.models.sdar:SDARConfig",
    default_algorithm="low_confidence_dynamic",
    defaults={"threshold": 0.85},
    visibility=BlockCausal(),
    mask_token="<|MASK|>",
)

# Autoregressive models that also draft tokens at mask tokens (I-DLM). They have SDAR's names.
REGULAR_CAUSAL = "use_regular_causal"

IDLM = Family(
    name="idlm",
    served_as="idlm",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    config_class="vllm.diffusion.models.idlm:IDLMConfig",
    default_algorithm="introspective",
    visibility=CausalContext(is_strict=True),
    mask_token="<|MASK|>",
    marks=(REGULAR_CAUSAL,),
    draft_folder="adapter",
)

SDAR_MOE = replace(
    SDAR,
    name="sdar-moe",
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
    config_class="vllm.diffusion.models.sdar_moe:SDARMoeConfig",
)

LLADA2 = Family(
    name="llada2",
    served_as="llada2",
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe",),
    config_class="vllm.diffusion.models.llada2:LLaDA2Config",
    default_algorithm="low_confidence_dynamic",
    defaults={"steps_per_block": 32},
    caps_steps=True,
    scores_after_filters=True,
    visibility=BlockCausal(),
    mask_token="<|mask|>",
)

LLADA21 = replace(
    LLADA2,
    name="llada2.1",
    model_types=("llada21_moe",),
    default_algorithm="joint_threshold",
    caps_steps=False,
)

LLADA22 = replace(
    LLADA2,
    name="llada2.2",
    served_as="llada22",
    config_class="vllm.diffusion.models.llada22:LLaDA22Config",
    default_algorithm="levenshtein",
    caps_steps=False,
    visibility=BlockCausal(is_whole=True),
    marks=("expert_capacity",),
    edit_tokens=("delete_token_id", "split_token_id"),
)

FAST_DLLM = Family(
    name="fast-dllm",
    served_as="fast-dllm",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    config_class="vllm.diffusion.models.fast_dllm:FastDLLMConfig",
    default_algorithm="hierarchy_block",
    scores_after_filters=True,
    logit_shift=1,
    visibility=BlockCausal(),
    mask_token="|<MASK>|",
)

# Its releases have Llama's model type, which remains upstream's.
STABLE_DIFFCODER = Family(
    name="stable-diffcoder",
    served_as="stable-diffcoder",
    architectures=("StableDiffcoderForCausalLM",),
    model_types=(),
    config_class="vllm.diffusion.models.stable_diffcoder:StableDiffCoderConfig",
    default_algorithm="low_confidence_dynamic",
    defaults={"threshold": 0.95, "temperature": 0.0, "confidence_dtype": "float64"},
    counts_masks=True,
    visibility=BlockCausal(),
    mask_token="<[MASK_TOKEN]>",
)

NEMOTRON = Family(
    name="nemotron",
    served_as="nemotron",
    architectures=("NemotronLabsDiffusionModel",),
    model_types=("nemotron_labs_diffusion",),
    config_class="vllm.diffusion.models.nemotron:NemotronConfig",
    default_algorithm="low_confidence_dynamic",
    defaults={"threshold": 0.9, "confidence_dtype": "logits"},
    counts_masks=True,
    visibility=CausalContext(),
    think_tokens=("<think>", "</think>"),
    draft_folder="linear_spec_lora",
)

DIFFUSION_GEMMA = Family(
    name="diffusion-gemma",
    served_as="diffusion-gemma",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_types=("diffusion_gemma",),
    config_class="vllm.diffusion.models.diffusion_gemma:DiffusionGemmaConfig",
    default_algorithm="entropy_bound",
    defaults={"temperature": 1.0, "steps_per_block": 48},
    visibility=CausalContext(is_open=True),
    model_class="vllm.diffusion.models.gemma_model:GemmaModel",
)

# Its checkpoints have Llama's model type and architecture, which remain upstream's.
DIFFULLAMA = Family(
    name="diffullama",
    architectures=("DiffuLlamaForCausalLM",),
    model_types=(),
    config_class="vllm.diffusion.models.diffullama:DiffuLlamaConfig",
    default_algorithm="dream",
    defaults={"alg": "origin", "eps": 0.0, "steps": 64, "temperature": 0.9, "top_p": 0.9},
    logit_shift=1,
)

# Autoregressive models that were trained into diffusion models. Their config.json often does not
# state the kind of training; `--hf-overrides` may name it under this key.
A2D_KIND = "a2d_kind"

A2D_QWEN3 = Family(
    name="a2d-qwen3",
    served_as="a2d",
    architectures=("A2DQwen3LMHeadModel",),
    model_types=("a2d-qwen3",),
    config_class="vllm.diffusion.models.a2d:A2DQwen3Config",
    default_algorithm="semi_ar",
    defaults={"block_length": 64},
    end_of_turn_tokens=("<|im_end|>",),
    mask_token="<|mask|>",
    template_arguments={"enable_thinking": False},
)

A2D_QWEN2 = replace(
    A2D_QWEN3,
    name="a2d-qwen2",
    architectures=("A2DQwen2LMHeadModel",),
    model_types=("a2d-qwen2",),
    config_class="vllm.diffusion.models.a2d:A2DQwen2Config",
)

A2D_LLAMA = replace(
    A2D_QWEN3,
    name="a2d-llama",
    architectures=("A2DLlamaLMHeadModel",),
    model_types=("a2d-llama",),
    config_class="vllm.diffusion.models.a2d:A2DLlamaConfig",
    end_of_turn_tokens=("<|im_end|>", "<|eot_id|>"),
)

# The same models, trained to denoise one block after the other.
A2D_BLOCKS = tuple(
    replace(
        family,
        name=f"{family.name}-bd3lm",
        defaults={},
        scores_clean=True,
        visibility=BlockCausal(),
        block_grids=("answer", "start"),
        marks=("block_size",),
    )
    for family in (A2D_QWEN3, A2D_QWEN2, A2D_LLAMA)
)

FAMILIES: tuple[Family, ...] = (
    *(LLADA, DREAM, LLADA_MOE, DIFFULLAMA, A2D_QWEN3, A2D_QWEN2, A2D_LLAMA, *A2D_BLOCKS),
    *(LLADA2, LLADA21, LLADA22, SDAR, IDLM, SDAR_MOE, FAST_DLLM, STABLE_DIFFCODER, NEMOTRON),
    DIFFUSION_GEMMA,
)

ARCHITECTURES = frozenset(name for family in FAMILIES for name in family.architectures)


def family_of(
    architectures: Sequence[str] | None,
    model_type: str | None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Family | None:
    """Return the family of a checkpoint, or None if Mosaic does not serve it.

    The first known architecture selects the families. If several families have it, the one whose
    marks are set in `config` (the contents of config.json) is chosen, else the one with the model
    type, else the first.
    """
    name = next((name for name in architectures or () if name in ARCHITECTURES), None)
    families = [family for family in FAMILIES if name in family.architectures]
    marked = [f for f in families if f.marks and all(config.get(key) for key in f.marks)]
    plain = [family for family in families if not family.marks]
    named = [family for family in plain if model_type in family.model_types]
    return next(iter(marked + named + plain), None)


SERVED_AS = tuple(dict.fromkeys(f.served_as for f in FAMILIES if f.served_as is not None))


def why_not_served(
    name: str,
    architectures: Sequence[str] | None,
    model_type: str | None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    """Return why the server script of a family (`SERVED_AS`) refuses a checkpoint, or None."""
    family = family_of(architectures, model_type, config)
    served_as = None if family is None else family.served_as
    if served_as == name:
        return None
    marks = () if family is None else family.marks
    given = f"architectures: given {_with_marks(', '.join(architectures or ()) or 'none', marks)}"
    wanted_here = [family for family in FAMILIES if family.served_as == name]
    plain = {arch for f in wanted_here if not f.marks for arch in f.architectures}
    marked = {(arch, f.marks) for f in wanted_here for arch in f.architectures if arch not in plain}
    names = sorted(plain | {_with_marks(*one) for one in marked})
    wanted = f"{given}; {_script(name)} serves {' or '.join(names)}"
    return wanted if served_as is None else f"{wanted}; {_script(served_as)} serves this one"


def _script(name: str) -> str:
    return f"scripts/run_{name.replace('-', '_')}_server.sh"


def _with_marks(architecture: str, marks: Sequence[str]) -> str:
    return " with ".join((architecture, *marks))

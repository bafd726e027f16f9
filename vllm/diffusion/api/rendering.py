# SPDX-License-Identifier: Apache-2.0
"""Renderer of conversations and prompts: upstream's, with refusals that name the field.

All routes and the offline `LLM` tokenise with it, so it is the last place where a text or an
argument of the chat template can be refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from vllm.diffusion.api.bodies import check_template_kwargs
from vllm.diffusion.api.tool_prompts import with_tools
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.core.surrogates import refuse_lone_surrogates
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import AssistantTracker, HfRenderer, resolve_chat_template

_OF_UPSTREAM = frozenset(
    {"add_generation_prompt", "continue_final_message", "documents", "tokenize", "tools"}
)


# Characters of a prompt that is tokenised in the event loop. This takes less than a millisecond;
# handing the prompt to a thread takes about half of one.
SHORT_PROMPT = 4096


class DiffusionRenderer(HfRenderer):
    """Renderer of our models."""

    def render_messages(self, messages: Any, params: Any) -> Any:
        try:
            return super().render_messages(*self._with_tools(messages, params))
        except (InvalidParameterError, VLLMValidationError, jinja2.TemplateError) as error:
            raise _refusal(error, messages, params) from None

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        try:
            return await super().render_messages_async(*self._with_tools(messages, params))
        except (InvalidParameterError, VLLMValidationError, jinja2.TemplateError) as error:
            raise _refusal(error, messages, params) from None

    def _with_tools(self, messages: Any, params: Any) -> tuple[list[Any], Any]:
        """Check messages and arguments; add tools to the messages if the template lists none."""
        _check(messages, params)
        own = self.model_config.hf_config.family.template_arguments
        given = {**own, **params.chat_template_kwargs}
        template = resolve_chat_template(
            self.get_tokenizer(),
            params.chat_template,
            given.get("tools"),
            model_config=self.model_config,
        )
        rendered, tools = with_tools(messages, given.get("tools"), template or "")
        return rendered, replace(params, chat_template_kwargs={**given, "tools": tools})

    def tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        _check_text(prompt)
        return super().tokenize_prompt(prompt, params)

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        _check_text(prompt)
        text = prompt.get("prompt")
        if isinstance(text, str) and len(text) <= SHORT_PROMPT:
            return super().tokenize_prompt(prompt, params)
        return await super().tokenize_prompt_async(prompt, params)


def _check(messages: Any, params: Any) -> None:
    """Refuse texts and arguments that make upstream's renderer fail or exhaust the memory."""
    refuse_lone_surrogates(messages, "messages")
    given = params.chat_template_kwargs
    check_template_kwargs({name: given[name] for name in given if name not in _OF_UPSTREAM})
    # Upstream's own routes pass false. The value true would make the tokenizer pad.
    if given.get("tokenize"):
        check_template_kwargs({"tokenize": given["tokenize"]})
    if params.chat_template is not None:
        parse(params.chat_template)


def _check_text(prompt: Any) -> None:
    try:
        refuse_lone_surrogates(prompt.get("prompt") if isinstance(prompt, dict) else prompt)
    except InvalidParameterError as error:
        refusal = InvalidParameterError("prompt", error.given, error.wanted)
        raise RequestRefused(refusal) from None


@lru_cache(maxsize=16)
def parse(template: str) -> None:
    """Parse a chat template as upstream does.

    Raises:
        TemplateSyntaxError: the template is not valid Jinja.
    """
    jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[AssistantTracker, jinja2.ext.loopcontrols],
    ).parse(template)


def _refusal(error: Exception, messages: Any, params: Any) -> Exception:
    """Return the refusal for a rendering error: one line that names the field."""
    if isinstance(error, InvalidParameterError):
        return RequestRefused(error)
    cause = error.__cause__ if isinstance(error, VLLMValidationError) else error
    if not isinstance(cause, Exception):
        return error
    reason = " ".join(str(cause).split())
    if type(cause) is jinja2.TemplateError:  # raised by `raise_exception` in the template
        wanted = f"the chat template refuses them: {reason}"
        return RequestRefused(InvalidParameterError("messages", messages, wanted))
    given = params.chat_template or "the checkpoint's"
    wanted = f"wanted one that renders these messages: {type(cause).__name__}: {reason}"
    return RequestRefused(InvalidParameterError("chat_template", given, wanted))

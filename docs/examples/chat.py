#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chat with a diffusion language model in a terminal, and watch each answer take shape.

With a server (see README.md), or with an engine inside this process:

    python docs/examples/chat.py --server http://127.0.0.1:8901
    python docs/examples/chat.py --model models/llada-tiny --local-leap

Committed tokens are bright. Proposals that may still change are dim, and masked positions are dots.
Ctrl-D ends the conversation. Questions can also come from a pipe, one per line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Messages = list[dict[str, str]]


class Frame(NamedTuple):
    """The state of an answer after a step.

    Attributes:
        text: the final part of its text.
        canvas: text of every position, and whether it is committed; empty if it is not known.
        progress: number of steps and tokens, elapsed and remaining time.
        num_end_tokens: number of end tokens in the canvas of a complete answer.
    """

    text: str
    canvas: list[tuple[str, bool]]
    progress: str = ""
    num_end_tokens: int = 0

    def render(self) -> Text:
        if not self.canvas:
            return Text(self.text)
        shown = Text(f"{self.progress}\n", "dim")
        for piece, is_committed in self.canvas:
            if piece.startswith("<|") and piece.endswith("|>"):  # a special token, or a mask
                piece = "" if is_committed else "·"
            shown.append(piece, "" if is_committed else "dim")
        return shown


class Clock:
    """Describes the progress of an answer, and estimates the remaining time."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def progress_of(self, step: int, committed: Sequence[bool]) -> str:
        seconds, done = time.monotonic() - self._started, sum(committed)
        left = f", {seconds * (len(committed) / done - 1):.1f} s left" if done else ""
        return f"step {step}, {done} of {len(committed)} tokens, {seconds:.1f} s{left}"


class Model(Protocol):
    def answer(self, messages: Messages) -> Iterator[Frame]:
        """Yield frames of the answer; the last one is complete."""


class Server:
    """A running server (`POST /generate`)."""

    def __init__(self, url: str, api_key: str | None, fields: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600)
        self._fields = fields

    def answer(self, messages: Messages) -> Iterator[Frame]:
        body = {"messages": messages, "stream": True, **self._fields}
        try:
            yield from self._frames(body)
        except httpx.TransportError as error:
            raise SystemExit(f"error: no answer from {self._http.base_url}: {error}") from None

    def _frames(self, body: dict[str, Any]) -> Iterator[Frame]:
        text, clock = "", Clock()
        with self._http.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise SystemExit(f"error: {response.json()['error']['message']}")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise SystemExit(f"error: {event['error']['message']}")
                if event["object"] == "text_diffusion.canvas":
                    canvas = event["canvas"]
                    pieces = zip(canvas["text"], canvas["committed"], strict=True)
                    progress = clock.progress_of(canvas["step"], canvas["committed"])
                    yield Frame(text, list(pieces), progress)
                else:
                    text = event["text"][0] if isinstance(event["text"], list) else event["text"]
                    report = event.get("diffusion", {})
                    yield Frame(text, [], num_end_tokens=report.get("num_end_tokens", 0))


class Engine:
    """vLLM inside this process."""

    def __init__(self, model: str, fields: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm.sampling_params import RequestOutputKind

        from vllm import LLM, SamplingParams

        try:
            self._engine = LLM(model=model, use_tqdm_on_load=False).llm_engine
        except (OSError, ValueError) as error:  # no checkpoint, or an unsupported one
            raise SystemExit(f"error: {error}") from None
        self._tokenizer = self._engine.get_tokenizer()
        self._sampling = SamplingParams(
            temperature=fields.get("temperature", 0.0),
            max_tokens=None,
            extra_args=fields,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self._num_asked = 0

    def answer(self, messages: Messages) -> Iterator[Frame]:
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        token_ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        self._num_asked += 1
        request = {"prompt_token_ids": token_ids}
        self._engine.add_request(str(self._num_asked), request, self._sampling)
        clock = Clock()
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                report = (output.kv_transfer_params or {}).get("dllm", {})
                canvas = [] if output.finished else self._unpack(report.get("canvas"))
                step = report["canvas"]["step"] if canvas else 0
                progress = clock.progress_of(step, [is_committed for _, is_committed in canvas])
                num_end_tokens = report.get("num_end_tokens", 0)
                yield Frame(output.outputs[0].text, canvas, progress, num_end_tokens)

    def _unpack(self, canvas: dict[str, Any] | None) -> list[tuple[str, bool]]:
        """Decode each position. Token ids are int32, flags are bytes."""
        if canvas is None:
            return []
        token_ids = memoryview(canvas["token_ids"]).cast("i").tolist()
        committed = memoryview(canvas["committed"]).cast("?").tolist()
        pieces = (self._tokenizer.decode([token_id]) for token_id in token_ids)
        return list(zip(pieces, map(bool, committed), strict=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", metavar="URL", help="URL of a running server")
    where.add_argument("--model", metavar="FOLDER", help="a checkpoint to load into this process")
    parser.add_argument("--adapter", metavar="NAME", help="a LoRA adapter of the server")
    parser.add_argument(
        "--api-key", default=os.environ.get("VLLM_API_KEY"), help="API key of the server"
    )
    parser.add_argument("--gen-length", type=int, default=32, help="canvas length (default: 32)")
    parser.add_argument("--steps", type=int, help="denoising steps (default: one per token)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument(
        "--local-leap",
        action="store_true",
        help="commit several tokens per step, around tokens with a high confidence",
    )
    parser.add_argument("--plain", action="store_true", help="show only the final text")
    args = parser.parse_args()
    if args.adapter and not args.server:
        parser.error("--adapter: given without --server; wanted both")
    return args


def diffusion_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of every request."""
    fields: dict[str, Any] = {"gen_length": args.gen_length, "temperature": args.temperature}
    if args.steps is not None:
        fields["steps"] = args.steps
    if args.local_leap:
        fields["algorithm"] = "local_leap"
    if not args.plain:
        fields["stream_canvas"] = True
    if args.adapter:
        fields["model"] = args.adapter
    return fields


def questions() -> Iterator[str]:
    """Yield the lines of the terminal or of a pipe, without empty lines."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line.strip()


def show(frames: Iterator[Frame], console: Console) -> str:
    """Draw each frame over the previous one, or only the last one to a pipe; return the answer."""
    frame = Frame("", [])
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for frame in frames:
            if console.is_terminal:
                live.update(frame.render(), refresh=True)
    if frame.text:
        console.print(Text(frame.text))
    else:
        console.print(Text(f"empty answer: {frame.num_end_tokens} end tokens", "dim"))
    return frame.text


def main() -> None:
    args = parse_arguments()
    fields = diffusion_fields(args)
    model: Model = (
        Server(args.server, args.api_key, fields) if args.server else Engine(args.model, fields)
    )
    console = Console(highlight=False)
    messages: Messages = []
    for question in questions():
        messages.append({"role": "user", "content": question})
        answer = show(model.answer(messages), console)
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()

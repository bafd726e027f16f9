#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a server through the `openai` package, without and with a stream.

    python docs/examples/openai_client.py --server http://127.0.0.1:8901

Pass fields that are not part of OpenAI's API in `extra_body`.
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI

DIFFUSION = {"gen_length": 32, "steps": 16, "block_length": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server through the openai package.")
    parser.add_argument("--server", metavar="URL", default="http://127.0.0.1:8901")
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY", "none"))
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.server}/v1", api_key=args.api_key)
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        extra_body=DIFFUSION,
    )
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is 3 plus 4?"}],
        temperature=0,
        stream=True,
        extra_body=DIFFUSION,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()

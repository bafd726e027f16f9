#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a server through LangChain (`pip install langchain-openai`).

    python docs/examples/langchain_client.py --server http://127.0.0.1:8901

In LlamaIndex, pass the same `extra_body` to
`OpenAILike(api_base=..., is_chat_model=True, additional_kwargs={"extra_body": {...}})`.
"""

from __future__ import annotations

import argparse
import os

from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server through LangChain.")
    parser.add_argument("--server", metavar="URL", default="http://127.0.0.1:8901")
    parser.add_argument(
        "--model", default="models/llada-tiny", help="name of the model in /v1/models"
    )
    args = parser.parse_args()
    chat = ChatOpenAI(
        base_url=f"{args.server}/v1",
        api_key=os.environ.get("VLLM_API_KEY", "none"),
        model=args.model,
        temperature=0,
        extra_body={"gen_length": 32, "steps": 16, "block_length": 32},
    )
    print(chat.invoke("What is the capital of France?").content)
    for chunk in chat.stream("What is 3 plus 4?"):
        print(chunk.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()

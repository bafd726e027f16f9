# SPDX-License-Identifier: Apache-2.0
"""A fake server that starts at once and fails in every way.

It reads these environment variables: PORT; STAND_IN_LIMIT, the largest sum of prompt and canvas;
STAND_IN_FAILURE, the failure on a longer request; STAND_IN_FOLDER, the folder for its process ids
and its requests; STAND_IN_STUBBORN, which makes it ignore SIGTERM. Its child process, which
represents the engine, always ignores SIGTERM.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["STAND_IN_FOLDER"])
LIMIT = int(os.environ.get("STAND_IN_LIMIT", "1000000"))
FAILURE = os.environ.get("STAND_IN_FAILURE", "refuse")
NO_MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB"


def log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = len(body["prompt"]) + body["gen_length"]
        with (FOLDER / "asked.jsonl").open("a") as file:
            file.write(json.dumps({"length": length, "steps": body["steps"]}) + "\n")
        if length > LIMIT:
            self.fail(length)
            return
        for step in range(body["steps"]):
            log(f"INFO plan for T = {length} with 1.00 GiB: rows a chunk: attend {step}")
            log(f"INFO execute_diffusion_once time = {length + step:.3f} ms, requests = 1")
        self.answer_canvas(body["gen_length"], length)

    def fail(self, length: int) -> None:
        if FAILURE == "refuse":
            self.error(400, f"a prompt and canvas of {length}; wanted at most {LIMIT}")
        elif FAILURE == "no memory":
            self.error(500, NO_MEMORY)
        elif FAILURE == "error":
            self.error(500, "ZeroDivisionError: division by zero")
        elif FAILURE == "die":
            log("(EngineCore pid=1) ERROR [core.py:7] ValueError: the engine broke")
            log("one more line")
            os._exit(3)
        elif FAILURE == "hang":
            time.sleep(600)
        elif FAILURE == "cut":
            self.answer_canvas(1, length)

    def answer_canvas(self, num_tokens: int, length: int) -> None:
        report = {"num_forwards": 1, "peak_bytes": 24576 * length, "average_bytes": 20480 * length}
        self.answer(200, {"token_ids": [[7] * num_tokens], "diffusion": report})

    def error(self, status: int, message: str) -> None:
        self.answer(status, {"error": {"message": message, "param": None}})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if FAILURE == "no start":
        raise ValueError("no such checkpoint")
    if "STAND_IN_STUBBORN" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: log("told to end"))
    log(f"arguments: {sys.argv[1:]}")
    log(f"GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}, length {os.environ['MAX_MODEL_LEN']}")
    if not (engine := os.fork()):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    with (FOLDER / "pids").open("a") as pids:
        pids.write(f"{os.getpid()} {engine}\n")
    ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the tiny model by reinforcement learning (GRPO), with its rollouts from a server.

    mkdir -p /tmp/updates
    VLLM_SERVER_DEV_MODE=1 scripts/run_llada_server.sh models/llada-tiny \
        --dtype float32 --weight-transfer-config '{"backend": "disk"}' \
        --additional-config '{"dllm": {"weight_update_root": "/tmp/updates"}}'
    python docs/examples/rl_tiny.py --updates /tmp/updates

With `--lora 8` only an adapter is trained, and each iteration loads it under a new name. The server
then needs other flags:

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 \
        scripts/run_llada_server.sh models/llada-tiny --dtype float32 --enable-lora --max-loras 2

The questions have wordings that the model was not trained on, for example "the sky is of what
colour?". The reward is 1 for the right answer, else 0. Each iteration asks some questions several
times at temperature 1, and takes one step of AdamW. It maximises a sum over the committed tokens:
the ratio of a token's probabilities in the trainer and in the server, clipped as in PPO, times the
advantage of its answer over the other answers to the same question. A probability is that of the
token, given the canvas before its step. Then the server loads the new weights from a file.

The script prints the mean reward of every iteration, and draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import httpx  # noqa: E402
import torch  # noqa: E402 (behind the path of the network)
from safetensors.torch import save_file  # noqa: E402
from tiny_model.checkpoint import load_weights, read_config  # noqa: E402
from tiny_model.facts import KINDS, all_facts  # noqa: E402
from tiny_model.llada import LLaDANetwork  # noqa: E402
from tiny_model.tokenizer import load_tokenizer  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils.parametrize import register_parametrization  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

CANVAS = {"gen_length": 32, "block_length": 32, "steps": 8}
SAMPLED = {**CANVAS, "temperature": 1.0, "cache": "none", "return_trajectory": True}
# Wordings that the training of the tiny model does not use.
WORDINGS = {
    "country": ("Tell me where {capital} is.", "I want to know where {capital} is."),
    "colour": ("{thing} has which colour?", "{thing} is of what colour?"),
    "difference": ("What is left of {a} minus {b}?", "Take {a} and minus {b}."),
    "sum": ("Sum {a} and {b}.", "Add {a} to {b}."),
}
LEARNING_RATE = 6e-5
ADAPTER_LEARNING_RATE = 3e-3
ADAPTER_SCALE = 2.0  # lora_alpha / r
CLIP = 0.2  # of the ratio of probabilities
MAX_DIFFERENCE = 1e-4  # between log probabilities of the server and of the trainer


@dataclass(frozen=True)
class Question:
    """A question, as the token ids of its prompt, and its only right answer."""

    prompt: list[int]
    answer: str


@dataclass(frozen=True)
class Rollout:
    """An answer with its reward, and its advantage over other answers to the same question."""

    prompt: list[int]
    trajectory: dict[str, Any]
    reward: float
    advantage: float


class Server:
    """The routes of the server that a trainer needs.

    Args:
        url: URL of the server.
        updates: folder for weights and adapters.
    """

    def __init__(self, url: str, updates: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=600, trust_env=False)
        self._updates = updates
        self._newest: Path | None = None
        self._adapter: str | None = None

    def post(self, route: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Send a request, and return the answer."""
        answer: dict[str, Any] = json.loads(self._post_text(route, body, **query))
        return answer

    def _post_text(self, route: str, body: dict[str, Any] | None = None, **query: str) -> str:
        response = self._http.post(route, json=body, params=query)
        if response.status_code != 200:
            raise SystemExit(f"error: {route}: {response.status_code} {response.text}")
        return response.text

    def answers(self, questions: Sequence[Question], **fields: Any) -> dict[str, Any]:
        """Ask all questions at once, with the latest adapter if there is one."""
        body = {"prompt": [q.prompt for q in questions], "model": self._adapter, **fields}
        return self.post("/generate", body)

    def publish(self, trainer: Trainer, version: str) -> None:
        """Load a trainer's weights or its adapter into the server; requests pause meanwhile."""
        folder = self._updates / version
        shutil.rmtree(folder, ignore_errors=True)  # an earlier run may have left it
        folder.mkdir()
        self.post("/pause", mode="keep")
        try:
            if trainer.rank:
                self._load(trainer, version, folder)
            else:
                self._update(trainer, version, folder)
        finally:
            self.post("/resume")
        if self._newest is not None:
            shutil.rmtree(self._newest)
        self._newest = folder

    def _update(self, trainer: Trainer, version: str, folder: Path) -> None:
        save_file(trainer.network.state_dict(), folder / "model.safetensors")
        self.post("/start_weight_update")
        self.post("/update_weights", {"update_info": {"path": version}})
        self.post("/finish_weight_update", {"weight_version": version})

    def _load(self, trainer: Trainer, version: str, folder: Path) -> None:
        """Load the adapter under a new name, and unload the previous one."""
        save_file(trainer.adapter(), folder / "adapter_model.safetensors")
        rank, alpha = trainer.rank, trainer.rank * ADAPTER_SCALE
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        path = str(folder.resolve())
        self._post_text("/v1/load_lora_adapter", {"lora_name": version, "lora_path": path})
        if self._adapter is not None:
            self._post_text("/v1/unload_lora_adapter", {"lora_name": self._adapter})
        self._adapter = version


class LowRank(nn.Module):
    """A weight plus the product of two small matrices, which is zero at first.

    Args:
        weight: [out, in].
        rank: rows of the first matrix.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(torch.zeros(weight.shape[0], rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ADAPTER_SCALE * self.lora_B @ self.lora_A


class Trainer:
    """Trains the network.

    Args:
        model: folder of the checkpoint that the server has loaded.
        learning_rate: learning rate of AdamW.
        rank: rank of the adapter that is trained; 0 to train all weights.
    """

    def __init__(self, model: Path, learning_rate: float, rank: int = 0) -> None:
        self.network = LLaDANetwork(read_config(model))
        load_weights(model, self.network)
        self.rank = rank
        self._mask_id = read_config(model)["mask_token_id"]
        self._low_ranks = self._add_adapter() if rank else {}
        learning = [p for p in self.network.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            learning, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def _add_adapter(self) -> dict[str, LowRank]:
        """Freeze the network, and add adapters to the matrices of its layers; return them."""
        self.network.requires_grad_(requires_grad=False)
        tensors = self.network.state_dict(keep_vars=True).items()
        names = {id(tensor): name.removesuffix(".weight") for name, tensor in tensors}
        low_ranks = {}
        for layer in self.network.model.layers:
            for module in list(layer.modules()):
                if isinstance(module, nn.Linear):
                    low_rank = LowRank(module.weight, self.rank)
                    low_ranks[names[id(module.weight)]] = low_rank
                    register_parametrization(module, "weight", low_rank)
        return low_ranks

    def adapter(self) -> dict[str, Tensor]:
        """Return the tensors of the adapter, with PEFT's names."""
        return {
            f"base_model.model.{name}.{part}.weight": getattr(low_rank, part).detach()
            for name, low_rank in self._low_ranks.items()
            for part in ("lora_A", "lora_B")
        }

    def learn(self, rollouts: Sequence[Rollout]) -> float:
        """Take one step of the optimizer.

        Returns:
            the largest difference between the log probabilities of the server and of the trainer,
            before the step.
        """
        num_commits = sum(len(r.trajectory["token_ids"]) for r in rollouts)
        largest = 0.0
        self.network.zero_grad()
        for alike in _by_length(rollouts):
            logprobs, given, advantages = self._commits(alike)
            largest = max(largest, float((logprobs - given).abs().max().detach()))
            ratio = (logprobs - given).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            gain = torch.minimum(ratio * advantages, clipped * advantages).sum()
            (-gain / num_commits).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        return largest

    def _commits(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the trainer's and the server's log probabilities of all K commits, and advantages.

        All three are [K]. The prompts have the same length. One forward computes the canvases
        before all steps.
        """
        states, rows, positions, tokens = [], [], [], []
        given, advantages = [], []
        for rollout in rollouts:
            trajectory, start = rollout.trajectory, len(rollout.prompt)
            steps = torch.tensor(trajectory["commit_steps"])
            ids = torch.tensor(trajectory["token_ids"])
            for step in range(1, trajectory["num_steps"] + 1):
                canvas = ids.masked_fill((steps >= step) | (steps < 0), self._mask_id)
                committed = (steps == step).nonzero()[:, 0]
                rows += [len(states)] * len(committed)
                positions.append(committed + start)
                tokens.append(ids[committed])
                given += [trajectory["logprobs"][index] for index in committed.tolist()]
                advantages += [rollout.advantage] * len(committed)
                states.append(torch.cat([torch.tensor(rollout.prompt), canvas]))
        hidden = self.network.hidden(torch.stack(states))[torch.tensor(rows), torch.cat(positions)]
        distribution = self.network.logits(hidden).log_softmax(dim=-1)
        ours = distribution.gather(1, torch.cat(tokens)[:, None])[:, 0]
        return ours, torch.tensor(given), torch.tensor(advantages)


def _by_length(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Group rollouts by the lengths of their prompts; leave out rollouts without an advantage."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.advantage:
            groups.setdefault(len(rollout.prompt), []).append(rollout)
    return list(groups.values())


def judged(
    questions: Sequence[Question], answers: dict[str, Any], num_answers: int
) -> list[Rollout]:
    """Compute the reward and the advantage of every answer."""
    rollouts = []
    for number, question in enumerate(questions):
        own = range(number * num_answers, (number + 1) * num_answers)
        rewards = torch.tensor([float(answers["text"][i] == question.answer) for i in own])
        spread = float(rewards.std(correction=0))
        for index, reward in zip(own, rewards.tolist(), strict=True):
            advantage = (reward - float(rewards.mean())) / (spread + 1e-4) if spread else 0.0
            trajectory = answers["trajectory"][index]
            rollouts.append(Rollout(question.prompt, trajectory, reward, advantage))
    return rollouts


def questions_of(model: Path) -> tuple[list[Question], list[Question]]:
    """Return the new questions, and the questions that the model was trained on."""
    tokenizer = load_tokenizer(model)

    def question(text: str, answer: str) -> Question:
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return Question(list(prompt), answer)

    new = [
        question(wording.format(**subject), kind.answer.format(**subject))
        for kind in KINDS
        for wording in WORDINGS.get(kind.name, ())
        for subject in kind.subjects
    ]
    return new, [question(fact.question, fact.answer) for fact in all_facts()]


def share_right(server: Server, questions: Sequence[Question]) -> float:
    """Return the share of questions whose answer at temperature 0 is right."""
    texts = server.answers(questions, **CANVAS, temperature=0.0)["text"]
    return sum(text == q.answer for text, q in zip(texts, questions, strict=True)) / len(texts)


def draw(rewards: Sequence[float], path: Path) -> None:
    """Draw the mean reward of every iteration."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot(range(1, len(rewards) + 1), rewards, marker=".")
    axes.set(xlabel="iteration", ylabel="mean reward", ylim=(0, 1))
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the tiny model by GRPO over HTTP.")
    parser.add_argument("--server", metavar="URL", default="http://127.0.0.1:8901")
    parser.add_argument(
        "--updates", type=Path, required=True, help="folder for weights and adapters"
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "llada-tiny")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--questions", type=int, default=16, help="per iteration")
    parser.add_argument("--answers", type=int, default=8, help="per question")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train only an adapter")
    parser.add_argument(
        "--learning-rate",
        type=float,
        help=f"default: {LEARNING_RATE:g}, or {ADAPTER_LEARNING_RATE:g} with --lora",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", type=Path, default=Path("rl_tiny.png"))
    options = parser.parse_args()
    if not options.updates.is_dir():
        parser.error(f"--updates: given {options.updates}; wanted an existing folder")
    rng = random.Random(options.seed)
    server = Server(options.server, options.updates)
    usual_rate = ADAPTER_LEARNING_RATE if options.lora else LEARNING_RATE
    torch.manual_seed(options.seed)
    trainer = Trainer(options.model, options.learning_rate or usual_rate, options.lora)
    new, known = questions_of(options.model)
    known = rng.sample(known, 128)
    server.publish(trainer, "step-0")
    print(f"share of right answers to questions of the training: {share_right(server, known):.3f}")

    rewards: list[float] = []
    started = time.monotonic()
    for iteration in range(options.iterations):
        questions = rng.sample(new, options.questions)
        seed = options.seed + 1000 * (iteration + 1)
        answers = server.answers(questions, **SAMPLED, n=options.answers, seed=seed)
        rollouts = judged(questions, answers, options.answers)
        version = "adapter" if options.lora else "weight_version"
        versions = {rollout.trajectory[version] for rollout in rollouts}
        if versions != {f"step-{iteration}"}:
            raise SystemExit(
                f"error: answers have the versions {versions}; wanted only step-{iteration}"
            )
        difference = trainer.learn(rollouts)
        if difference > MAX_DIFFERENCE:
            raise SystemExit(f"error: log probabilities differ by {difference:.1e}")
        server.publish(trainer, f"step-{iteration + 1}")
        rewards.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
        print(
            f"iteration {iteration + 1}: mean reward {rewards[-1]:.3f}, "
            f"log probabilities differ by up to {difference:.1e}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    few = min(5, len(rewards))
    first, last = sum(rewards[:few]) / few, sum(rewards[-few:]) / few
    still = share_right(server, known)
    print(f"mean reward: first {few} iterations {first:.3f}, last {few} iterations {last:.3f}")
    print(f"share of right answers to questions of the training: {still:.3f}")
    draw(rewards, options.curve)
    Path(options.curve).with_suffix(".json").write_text(json.dumps(rewards))
    return 0


if __name__ == "__main__":
    sys.exit(main())

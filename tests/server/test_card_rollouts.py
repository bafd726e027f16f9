# SPDX-License-Identifier: Apache-2.0
"""Weight updates from a trainer's GPU memory: by handles on the same GPU, by NCCL from another.

This process is the trainer and uses upstream's side of a transfer.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from tests.checkpoint_files import weights_of
from tests.server.client import Client
from tests.server.process import SERVER, ServerProcess, free_port, healthy

HEAD = "model.transformer.ff_out.weight"


@pytest.fixture(scope="module")
def model_dir(checkpoint: Callable[[str], Path]) -> Path:
    """Return a model with random weights, because these tests only compare answers."""
    return checkpoint("mha")


class Tensors(WeightSource):
    """The weights of a checkpoint on the GPU of this process."""

    def __init__(self, folder: Path) -> None:
        self.weights = {n: w.cuda().bfloat16() for n, w in weights_of(folder).items()}

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, w.dtype, tuple(w.shape)) for n, w in self.weights.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()


def transferred(server: ServerProcess, model_dir: Path, init_info: Any) -> None:
    """Send a head of zeros, then the model's own weights, and compare the server's answers."""
    source = Tensors(model_dir)
    with healthy(server), server.client() as http:
        client = Client(http)
        parameters = {"gen_length": 32, "steps": 8, "ignore_eos": True}

        def check(**body: Any) -> Any:
            response = http.post("/weight_checker", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        before = client.ask(**parameters)["token_ids"]
        own = check(action="checksum")["checksums"]
        trainer = WeightTransferTrainerFactory.trainer_init(
            init_info, client=HTTPVLLMWeightSyncClient(server.url), source=source
        )
        head = source.weights[HEAD]
        source.weights[HEAD] = torch.zeros_like(head)
        trainer.send_weights()
        assert len(check(action="compare", baseline=own)["mismatches"]) == 1
        assert client.ask(**parameters)["token_ids"] != before
        source.weights[HEAD] = head
        trainer.send_weights()
        assert check(action="compare", baseline=own)["match"]
        assert client.ask(**parameters)["token_ids"] == before
        trainer.shutdown()


def server_of(model_dir: Path, log: Path, backend: str, **variables: str) -> ServerProcess:
    # `env` starts a new process instead of a fork, because CUDA does not survive a fork.
    command = ["env", *SERVER, "--model", str(model_dir), "--dtype", "bfloat16"]
    command += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    variables |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    variables |= {"VLLM_ACTIVATION_POOL_SIZE_BYTES": f"{2 << 30}"}  # leaves memory to other tests
    return ServerProcess(command, log, **variables)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["tensors", "packed"])
def test_a_trainer_on_the_same_card(model_dir: Path, tmp_path: Path, packed: bool) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    server = server_of(model_dir, tmp_path / "server.log", "ipc", **insecure)
    transferred(server, model_dir, IPCTrainerInitInfo(rank=0, packed=packed))


def nccl_is_usable() -> bool:
    """Return whether upstream's transfers can use the NCCL library of this machine."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    try:
        NCCLLibrary()
    except AttributeError:
        return False
    return True


def nccl_server(model_dir: Path, log: Path, *, packed: bool) -> tuple[ServerProcess, Any]:
    """Return a server on the second GPU and the settings of its trainer."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    where = {"master_address": "127.0.0.1", "master_port": free_port()}
    info = NCCLTrainerInitInfo(rank=0, world_size=2, packed=packed, **where)
    return server_of(model_dir, log, "nccl", CUDA_VISIBLE_DEVICES="1"), info


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("packed", [False, True], ids=["tensors", "packed"])
def test_a_trainer_on_another_card(model_dir: Path, tmp_path: Path, packed: bool) -> None:
    if not nccl_is_usable():
        pytest.skip("vLLM cannot use this NCCL")
    server, info = nccl_server(model_dir, tmp_path / "server.log", packed=packed)
    transferred(server, model_dir, info)


@pytest.mark.multi_gpu(2)
def test_an_nccl_that_cannot_be_used_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """A server must not accept an NCCL whose broadcasts would silently transfer no data."""
    if nccl_is_usable():
        pytest.skip("vLLM can use this NCCL")
    server, info = nccl_server(model_dir, tmp_path / "server.log", packed=False)
    with pytest.raises(Exception, match="init_weight_transfer_engine"):
        transferred(server, model_dir, info)
    assert "2.29.7 or later" in server.log()

# SPDX-License-Identifier: Apache-2.0
"""A worker's calls for trainers: weight updates and sleep, with upstream's method names.

```
start_weight_update     collects the steps in flight, and pauses steps
update_weights          writes some tensors in place; may be called any number of times
finish_weight_update    starts a new generation of weights, and drops results of the old one
```

The addresses of the weights stay the same, so CUDA graphs stay valid.
"""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.diffusion import ops
from vllm.diffusion.config import TRANSFERS, settings_of
from vllm.diffusion.core.errors import CheckpointError
from vllm.diffusion.engine.worker.disk_transfer import readable_files, tensors_in
from vllm.diffusion.engine.worker.step_pause import release_kv_cache, restore_kv_cache
from vllm.diffusion.models.weights import stored_weights
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
    from vllm.diffusion.engine.worker.step_loop import StepLoop
    from vllm.diffusion.memory import WeightMemory
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.parallel.groups import Ranks
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

logger = init_logger(__name__)

_UPDATE = "an update of the weights is in progress"
_KV_CACHE, _DISCARDED = "kv_cache", "discarded"


Call = TypeVar("Call", bound="Callable[..., None]")


class RefusedCallError(RuntimeError):
    """A call that all ranks refuse before anything has changed."""


def _by_all_ranks(what: str | None = None) -> Callable[[Call], Call]:
    """Make a call fail on all ranks if it fails on one.

    Only the last rank raises the error, because upstream's executor stops reading replies at the
    first error. It would take the unread replies of later ranks for replies to the next call.

    Args:
        what: message for a failed call, after which steps stay paused; None if steps may continue
            after a failure.
    """

    def wrapped(call: Call) -> Call:
        @functools.wraps(call)
        def called(self: WeightWorker, *args: Any, **named: Any) -> None:
            failure: Exception | None = None
            try:
                with set_current_vllm_config(self.vllm_config), torch.no_grad():
                    call(self, *args, **named)
            except Exception as error:
                failure = error
            is_refused = isinstance(failure, RefusedCallError)
            failure = self.agree_on_failure(failure)
            if what is not None:
                self._did_last = failure is None
            if failure is None:
                return
            if what is not None and not is_refused:
                self.fail_update(what, failure)
            if self.rank == self.parallel_config.world_size - 1:
                raise failure

        return cast("Call", called)

    return wrapped


class RefusedUpdateError(RefusedCallError, ValueError):
    """Unreadable tensors, refused by all ranks before a weight has changed."""


class WeightSink(nn.Module):
    """The model that upstream's transfer engines receive: it loads tensors but has no parameters.

    If it had parameters, the engines would move them away to reload whole layers. The tensors of
    Mosaic's models are written in place instead.
    """

    def __init__(self, model: DiffusionModel) -> None:
        super().__init__()
        self._load = model.load_weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load some tensors; return the names of the parameters that were filled."""
        return self._load(weights)


class WeightWorker(WorkerBase):
    """Worker whose weights can be checked and changed between steps."""

    model_runner: DiffusionModelRunner
    loop: StepLoop
    ranks: Ranks
    weights: WeightMemory
    _transfer: WeightTransferEngine[Any, Any] | None = None
    _is_updating = False
    _has_loaded = False  # whether tensors have arrived since the update began
    _may_cancel = False  # whether the last update was refused before a weight changed
    _failed_before: str | None = None  # reason why steps were paused when the update began
    _did_last = False  # whether the last call of an update succeeded
    # Sizes of the page store, while its memory is released.
    _fixed_pages: tuple[int, ...] | None = None
    _reasons: Mapping[str, str] = MappingProxyType({})  # reasons why steps are paused, by holder

    @functools.cached_property
    def _sink(self) -> WeightSink:
        """The target of all updates; always the same, because engines may store data by target."""
        return WeightSink(self.model_runner.model)

    # ---- updates ----

    @_by_all_ranks()
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect to the trainer with the engine of `weight_transfer_config`."""
        transfer = self._transfer_engine()
        transfer.init_transfer_engine(transfer.parse_init_info(init_info))
        group = getattr(transfer, "model_update_group", None)
        # A disabled group's broadcasts would silently do nothing.
        if group is not None and group.disabled:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            raise RefusedCallError(
                f"weight_transfer_config: given NCCL {version}; wanted one that vLLM's transfers "
                "can use, 2.29.7 or later"
            )

    @_by_all_ranks()
    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect from the trainer."""
        self._check_turn("shutdown_weight_transfer_engine", is_updating=False)
        if self._transfer is not None:
            self._transfer.shutdown()
            self._transfer = None

    @_by_all_ranks("the update could not start")
    def start_weight_update(self) -> None:
        """Pause steps, and collect the steps in flight."""
        self._check_turn("start_weight_update", is_updating=False)
        model, transfer = self.model_runner.model, self._transfer_engine()
        _check_can_change(model)
        self.loop.pause_steps()
        model.begin_update()
        transfer.set_weight_update_target(self._sink, self.model_config)
        transfer.start_weight_update()
        self._is_updating, self._has_loaded, self._may_cancel = True, False, False
        self._failed_before = self._reasons.get("update")
        self._hold("update", _UPDATE)

    @_by_all_ranks()
    def start_draft_weight_update(self) -> None:
        """Refuse the call, because there is no draft model."""
        raise RefusedCallError(
            "start_draft_weight_update: wanted start_weight_update: no draft model"
        )

    def supports_draft_weight_updates(self) -> bool:
        return False

    @_by_all_ranks("the weights are partly new")
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load some tensors of the trainer; from a list, load this rank's entry."""
        self._check_turn("update_weights", is_updating=True)
        self._check_awake("update_weights")
        own_info, transfer = self._info_of_this_rank(update_info), self._transfer_engine()
        refusal: Exception | None = None
        try:
            transfer.parse_update_info(own_info)
        except (CheckpointError, TypeError, ValueError) as error:
            refusal = error
        refusal = self.agree_on_failure(refusal)
        if refusal is not None:
            if not self._has_loaded:
                self.fail_update("the update was refused", refusal)
                self._may_cancel = True
            raise RefusedUpdateError(str(refusal))
        self._has_loaded = True
        transfer.update_weights(own_info)

    def _info_of_this_rank(
        self, update_info: dict[str, Any] | list[dict[str, Any]]
    ) -> dict[str, Any]:
        if isinstance(update_info, dict):
            return update_info
        parallel = self.parallel_config
        first = parallel.data_parallel_index * parallel.world_size
        if len(update_info) < first + parallel.world_size:
            raise RefusedCallError(
                f"update_info: given a list of {len(update_info)}; wanted one entry for each rank, "
                f"at least {first + parallel.world_size}"
            )
        own_info: dict[str, Any] = update_info[first + self.rank]
        return own_info

    @_by_all_ranks("the update could not end")
    def finish_weight_update(self) -> None:
        """Resume steps with the new weights."""
        self._check_turn("finish_weight_update", is_updating=True)
        transfer = self._transfer_engine()
        transfer.finish_weight_update()
        transfer.reset_weight_update_target()
        self._end_update(must_be_complete=settings_of(self.vllm_config).weight_update_complete)

    @_by_all_ranks("the weights are partly new")
    def reload_weights(self, weights_path: str | None = None, **unknown: Any) -> None:
        """Load a whole checkpoint in place: from a folder, or the served one."""
        if unknown:
            raise RefusedCallError(
                f"reload_weights: given {', '.join(unknown)}; wanted weights_path or nothing"
            )
        self._check_turn("reload_weights", is_updating=False)
        self._check_awake("reload_weights")
        model = self.model_runner.model
        _check_can_change(model)
        try:
            files = readable_files(Path(weights_path or self.model_config.model))
        except CheckpointError as error:
            raise RefusedCallError(str(error)) from error
        self.loop.pause_steps()
        model.begin_update()
        model.load_weights(tensors_in(files))
        self._end_update(must_be_complete=True)

    @_by_all_ranks()
    def fail_with_others(self, reason: str) -> None:
        """Pause steps after a call of an update has failed on some replicas only."""
        self._may_cancel = False
        if self._did_last or self._is_updating:
            self._did_last = False
            self.fail_update("an update failed on another replica", RuntimeError(reason))

    @_by_all_ranks()
    def reset_weights(self) -> None:
        """Set all weights to zero, so that a check can detect an incomplete update."""
        self._check_turn("reset_weights", is_updating=False)
        self._check_awake("reset_weights")
        model = self.model_runner.model
        self.loop.pause_steps()
        for weight in stored_weights(model).values():
            weight.zero_()
        model.begin_update()
        model.end_update()

    def _check_turn(self, name: str, *, is_updating: bool) -> None:
        """Refuse a call that is out of order."""
        if self._is_updating != is_updating:
            before = "start" if is_updating else "finish"
            raise RefusedCallError(f"{name}: wanted {before}_weight_update first")

    def _check_awake(self, name: str) -> None:
        """Refuse a call that reads or writes weights whose memory is released."""
        if "weights" in self._reasons:
            raise RefusedCallError(f"{name}: wanted wake_up first: the weights are asleep")

    def _hold(self, who: str, reason: str | None) -> None:
        """Set the reason for which `who` pauses steps; None removes it."""
        others = {name: why for name, why in self._reasons.items() if name != who}
        self._reasons = others if reason is None else {**others, who: reason}
        self.loop.pause_steps().reason = next(iter(self._reasons.values()), None)

    def _end_update(self, *, must_be_complete: bool) -> None:
        """End an update; report missing tensors as an error or in the log."""
        missing = self.model_runner.model.end_update()
        if missing:
            message = f"{len(missing)} tensors did not arrive: {', '.join(missing[:8])}"
            if must_be_complete or _DISCARDED in self._reasons:
                raise CheckpointError(f"finish_weight_update: {message}")
            logger.warning("update of the weights: %s; these tensors have not changed", message)
        self._is_updating = False
        for who in ("update", _DISCARDED):
            self._hold(who, None)

    def has_succeeded(self) -> bool:
        """Return whether the last call of an update succeeded on this rank."""
        return self._did_last

    @_by_all_ranks()
    def cancel_update(self) -> None:
        """Cancel an update that was refused before a weight changed; steps may continue."""
        if self._may_cancel:
            self._may_cancel = False
            self.model_runner.model.cancel_update()
            self._hold("update", self._failed_before)

    def _transfer_engine(self) -> WeightTransferEngine[Any, Any]:
        """Return the engine of `weight_transfer_config`, created at first use."""
        config = self.vllm_config.weight_transfer_config
        if config is None:
            raise RefusedCallError(
                "weight_transfer_config: given none; wanted --weight-transfer-config with backend "
                f"{', '.join(TRANSFERS)}"
            )
        if self._transfer is None:
            device, model = self.device, self.model_runner.model
            self._transfer = WeightTransferEngineFactory.create_engine(
                config, self.vllm_config, device, model
            )
        return self._transfer

    def agree_on_failure(self, failure: Exception | None) -> Exception | None:
        """Return the failure of any rank, on all ranks; None if there is none."""
        if (agreement := self.model_runner.agreement) is not None:
            # This rank's failure: the gather below also reports it to the other ranks.
            with suppress(Exception):
                agreement.reach(failure)
        failures = self.ranks.every.all_gather_object(None if failure is None else str(failure))
        others = [text for text in failures if text is not None]
        return RuntimeError(others[0]) if failure is None and others else failure

    def fail_update(self, what: str, failure: Exception) -> None:
        """End a failed update; steps stay paused until another update has ended."""
        self._is_updating = False
        if self._transfer is not None:
            self._transfer.reset_weight_update_target()
        self._hold("update", f"{what}: {failure}")
        logger.error("%s: %s; steps are paused until an update has ended", what, failure)

    def holds_steps(self) -> bool:
        """Return whether requests wait: while weights change or sleep, and after a failure."""
        return bool(self._reasons)

    def weight_generation(self) -> int:
        """Return the number of weight changes so far."""
        return self.model_runner.model.weight_generation

    # ---- sleep mode ----

    @_by_all_ranks()
    def sleep(self, level: int = 1) -> None:
        """Release memory of the cache, of the pool, and of the weights.

        Level 1 copies the weights to the host. Level 2 discards them, so an update must bring all
        of them before the next step.
        """
        self._release_kv_cache()
        if "weights" in self._reasons:
            return
        self.suspend_weights(keeps=level < 2)
        self._hold("weights", "the weights are asleep")
        if level >= 2:
            self._hold(_DISCARDED, "the weights were discarded; an update must bring all of them")
            if self._is_updating:  # the tensors that have arrived are lost, too
                self.model_runner.model.begin_update()
        logger.info("asleep: level %d, %.2f GiB of weights", level, self.weights.num_bytes / 2**30)

    @_by_all_ranks()
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate memory again: for `weights`, for `kv_cache`, or for both."""
        if "weights" in self._reasons and (tags is None or "weights" in tags):
            self.resume_weights()
            self._hold("weights", None)
        if _KV_CACHE in self._reasons and (tags is None or _KV_CACHE in tags):
            self.loop.pause_steps().add(restore_kv_cache(self.model_runner, self._fixed_pages))
            self._hold(_KV_CACHE, None)

    @_by_all_ranks()
    def discard(self, tags: tuple[str, ...]) -> None:
        """Release keys and values, and the pool's memory."""
        if _KV_CACHE in tags:
            self._release_kv_cache()

    def suspend_weights(self, *, keeps: bool) -> None:
        """Release the memory of the weights; without `keeps` their contents are lost."""
        self.weights.suspend(keeps=keeps)

    def resume_weights(self) -> None:
        """Allocate the memory of the weights again."""
        self.weights.resume()

    def _release_kv_cache(self) -> None:
        if _KV_CACHE in self._reasons:
            return
        self.loop.pause_steps()
        self._fixed_pages = release_kv_cache(self.model_runner)
        self._hold(_KV_CACHE, "the memory of keys and values is released")

    # ---- checks ----

    def compute_weight_checksums(self) -> dict[str, str]:
        """Return a digest of each weight tensor on this rank; names are unique among ranks."""
        if "weights" in self._reasons:
            # Only the last rank raises the error: see `_by_all_ranks`.
            if self.rank == self.parallel_config.world_size - 1:
                self._check_awake("compute_weight_checksums")
            return {}
        prefix = self._rank_name()
        return {
            f"{prefix}{name}": digest_of(weight)
            for name, weight in stored_weights(self.model_runner.model).items()
        }

    def _rank_name(self) -> str:
        """Return upstream's name of this rank, with its index among the ranks that divide rows."""
        places = {
            "dp": self.parallel_config.data_parallel_index,
            "pp": get_pp_group().rank_in_group,
            "pcp": get_pcp_group().rank_in_group,
            "tp": get_tp_group().rank_in_group,
        }
        if self.ranks.sequence.size > 1:
            places["sp"] = self.ranks.sequence.rank
        return "".join(f"{name}{place}:" for name, place in places.items())

    def shutdown(self) -> None:
        """Disconnect from the trainer, if there is one."""
        if self._transfer is not None:
            self._transfer.shutdown()


def _check_can_change(model: DiffusionModel) -> None:
    """Refuse a model whose tensors are stored in another form than in the checkpoint.

    Raises:
        RefusedCallError: names that form.
    """
    form = ops.repacked_form(model.modules())
    if form is not None:
        raise RefusedCallError(
            f"update of the weights: given a checkpoint in the form of {form}, repacked as it was "
            "loaded; wanted a plain checkpoint, which --quantization fp8, int4 or nf4 makes smaller"
        )


def digest_of(weight: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    content = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()

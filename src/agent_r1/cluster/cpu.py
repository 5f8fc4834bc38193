"""Register the CPU as a verl platform, to try the distributed path without a GPU.

Each verl process imports this module first (`VERL_USE_EXTERNAL_MODULES`), on a CPU only. On a GPU
verl has the patches of no_flash_attn.py where flash-attn is missing, and trainer.py's overrides in
any case; tests/test_verl_inside.py lists all.

    platform         verl asks for it by name (`VERL_PLATFORM=cpu`)
    patches          where verl has no extension point
    weight updates   of a running vLLM

Another version of verl is refused, because an outdated patch fails silently.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import torch
import torch.distributed.fsdp
import transformers.utils
import verl

from agent_r1.cluster import VERL

if verl.__version__ != VERL:
    raise ImportError(
        f"agent_r1.cluster.cpu is for verl {VERL}, and {verl.__version__} is installed"
    )

# transformers imports scikit-learn, and so SciPy and pandas, for a decoding method that we do not
# use. That took a second of processor time in each of the five processes that import verl.
transformers.utils.is_sklearn_available = lambda: False

import verl.utils.distributed  # noqa: E402
import verl.utils.fsdp_utils  # noqa: E402
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402

# A CPU run has no flash-attn either: the critic's attention and log-probabilities in bfloat16.
import agent_r1.cluster.no_flash_attn  # noqa: E402, F401

# ------------------------------------------------------------------------------------- the platform


def _answers(value=None):
    return lambda *args, **kwargs: value


# verl calls an accelerator with torch.cuda's names. For most of them a CPU does nothing.
DEVICE_MODULE = SimpleNamespace(
    is_available=_answers(True),
    device_count=_answers(1),
    get_device_name=_answers("cpu"),
    stream=_answers(nullcontext()),
    mem_get_info=lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
    # verl's checkpoints contain the state of the device's generator; a CPU has only this one.
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    **dict.fromkeys(
        ("current_stream", "set_device", "synchronize", "empty_cache", "ipc_collect"), _answers()
    ),
    **dict.fromkeys(
        (
            "current_device",
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        ),
        _answers(0),
    ),
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Describe the CPU with one nominal GPU per rank, by which verl places workers."""

    device_name = vendor_name = "cpu"
    device_module = DEVICE_MODULE
    is_available = _answers(True)
    # verl passes it to `Tensor.to`, where an index would mean an accelerator.
    current_device = _answers("cpu")
    device_count = _answers(1)
    get_device_capability = _answers((None, None))
    communication_backend_name = _answers("gloo")
    visible_devices_envvar = _answers("CUDA_VISIBLE_DEVICES")
    ray_resource_name = _answers("GPU")
    ray_noset_envvars = _answers(["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"])
    is_ipc_supported = _answers(False)  # verl then moves weights through shared memory
    set_device = synchronize = set_allocator_settings = empty_cache = cudart = _answers()
    profiler_start = profiler_stop = manual_seed_all = _answers()
    nvtx_range = _answers(nullcontext())

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


# -------------------------------------------------------------------------------------- the patches

# 1. The process group's backend is formatted as "cpu:gloo,<device>:<backend>". With a CPU as the
#   device, "cpu" occurs twice, which torch refuses.
verl.utils.distributed.initialize_global_process_group_ray = functools.partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)


# 2. The reference model is offloaded with pin_memory=True, which needs an accelerator.
verl.utils.fsdp_utils.CPUOffloadPolicy = _answers(
    torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
)


# -------------------------------------------------------------------------------- weights into vLLM


def __getattr__(name: str):
    """Make `CpuWorkerExtension` when vLLM's worker asks: only that process imports vLLM."""
    if name != "CpuWorkerExtension":
        raise AttributeError(name)
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    class CpuWorkerExtension(vLLMColocateWorkerExtension):
        """Load new weights into vLLM's worker, which mixes this class in (settings.yaml).

        verl writes new weights into vLLM's parameters in place. vLLM's CPU backend repacks linear
        layers for its kernels, so that is impossible. Therefore the weights are collected and
        passed to vLLM's `reload_weights`, which redoes the packing.
        """

        def update_weights_from_ipc(
            self, peft_config=None, base_sync_done=False, use_shm=False
        ) -> None:
            weights: list[tuple[str, torch.Tensor]] = []

            def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
                weights.extend(
                    (name, tensor.clone()) for name, tensor in bucket
                )  # the buffer is reused

            handle = self._get_zmq_handle()
            device = torch.device("cpu")
            receiver = BucketedWeightReceiver(zmq_handle=handle, device=device, use_shm=use_shm)
            receiver.receive_weights(on_bucket_received=keep)
            self.model_runner.reload_weights(weights_iterator=iter(weights))

    return CpuWorkerExtension

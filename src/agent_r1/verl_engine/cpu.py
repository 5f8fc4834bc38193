"""A CPU as a platform of verl, so that the distributed path can be tried and tested without a GPU.

verl imports this module first in each of its processes (`VERL_USE_EXTERNAL_MODULES`), on a CPU only: a GPU run is
unpatched verl. Three parts: the platform, which verl asks for by name (`VERL_PLATFORM=cpu`); patches, for what none of
verl's extension points reaches; new weights into a running vLLM. The patches are for one version of verl, and another one
is refused, because a patch that no longer fits fails in silence.
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

from agent_r1.verl_engine import VERL

if verl.__version__ != VERL:
    raise ImportError(f"agent_r1.verl_engine.cpu is for verl {VERL}, and {verl.__version__} is installed")

# transformers looks into scikit-learn, and so imports SciPy and pandas, for a way of decoding that is not used here: that was a
# second of processor time in each of the five processes that import verl.
transformers.utils.is_sklearn_available = lambda: False

import verl.utils.distributed  # noqa: E402
import verl.utils.fsdp_utils  # noqa: E402
import verl.utils.model  # noqa: E402
from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402

# -------------------------------------------------------------------------------------------------------- the platform


def _answers(value=None):
    return lambda *args, **kwargs: value


# verl speaks to an accelerator in the words of torch.cuda. Most of the answers are "nothing to do".
DEVICE_MODULE = SimpleNamespace(
    is_available=_answers(True),
    device_count=_answers(1),
    get_device_name=_answers("cpu"),
    stream=_answers(nullcontext()),
    mem_get_info=lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
    # verl's checkpoints hold the state of the device's generator: on a CPU that is the one generator there is.
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    **dict.fromkeys(("current_stream", "set_device", "synchronize", "empty_cache", "ipc_collect"), _answers()),
    **dict.fromkeys(
        ("current_device", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
        _answers(0),
    ),
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Ray is told of nominal GPUs (launch.py), one for each rank, because verl places its workers by them."""

    device_name = vendor_name = "cpu"
    device_module = DEVICE_MODULE
    is_available = _answers(True)
    current_device = _answers("cpu")  # verl hands it to `Tensor.to`, where an index would mean an accelerator
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


# --------------------------------------------------------------------------------------------------------- the patches

# 1. The process group's backend is put together as "cpu:gloo,<device>:<backend>". With a CPU as the device, that names
#    "cpu" twice, which torch refuses.
verl.utils.distributed.initialize_global_process_group_ray = functools.partial(
    verl.utils.distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)


# 2. The critic is loaded with attn_implementation="flash_attention_2", whatever override_config says.
def load_value_model(local_path, torch_dtype, model_config, trust_remote_code):
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


verl.utils.model.load_valuehead_model = load_value_model

# 3. The reference model is offloaded with pin_memory=True, which needs an accelerator.
verl.utils.fsdp_utils.CPUOffloadPolicy = _answers(torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False))


# --------------------------------------------------------------------------------------------------- weights into vLLM


def __getattr__(name: str):
    """`CpuWorkerExtension`, made when vLLM's worker asks for it: its base imports vLLM, which no other process needs."""
    if name != "CpuWorkerExtension":
        raise AttributeError(name)
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    class CpuWorkerExtension(vLLMColocateWorkerExtension):
        """Named in settings.yaml; vLLM mixes it into its worker.

        verl writes new weights into vLLM's parameters in place. vLLM's CPU backend has repacked its linear layers into the
        layout of its kernels, so there is no such place: what verl's trainer sends is collected, and goes through vLLM's
        own `reload_weights`, which undoes and redoes the packing.
        """

        def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False) -> None:
            weights: list[tuple[str, torch.Tensor]] = []

            def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
                weights.extend((name, tensor.clone()) for name, tensor in bucket)  # the buffer is used again

            handle, device = self._get_zmq_handle(), torch.device("cpu")
            receiver = BucketedWeightReceiver(zmq_handle=handle, device=device, use_shm=use_shm)
            receiver.receive_weights(on_bucket_received=keep)
            self.model_runner.reload_weights(weights_iterator=iter(weights))

    return CpuWorkerExtension

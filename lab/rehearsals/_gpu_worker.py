"""Make a CPU work as a GPU in each verl process of a rehearsal (VERL_USE_EXTERNAL_MODULES).

Like a CPU run (cpu.py), but with flash-attn's packed rows: in the actor, the reference and the
critic.
"""

import verl.utils.model

from lab.rehearsals import _varlen

_varlen.install()
critic_as_on_a_gpu = verl.utils.model.load_valuehead_model

import agent_r1.cluster.cpu  # noqa: E402, F401

verl.utils.model.load_valuehead_model = (
    critic_as_on_a_gpu  # the patch of no_flash_attn is for runs without it
)

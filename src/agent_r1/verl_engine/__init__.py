"""Room 8: the same episodes, masks, rewards, advantages and losses on verl (Ray, FSDP2, vLLM).

Adapters only: what is agentic is imported from rollout/ and training/.

    launch.py       the user's process: checks, starts the driver, watches it, shows progress, cleans up behind it
    driver.py       the child process: starts a Ray of its own and hands verl its configuration
    compose.py      our Config -> verl's Hydra configuration, by settings.yaml
    trainer.py      verl's synchronous trainer with our advantages, metrics and checkpoints
    agent_loop.py   verl's agent loop: its server client as our Policy, under our episode loop
    algorithms.py   our estimators, policy loss and learning rate under the names that verl looks up
    checkpoints.py  FSDP shards -> a Hugging Face folder
    cpu.py          "cpu" as a platform of verl

verl, Ray and vLLM are imported in the modules that need them and nowhere else: without them, everything but
`--engine verl` works, and `requirements/verl-cpu.txt` says how to get them.
"""

VERL = "0.9.1"
"""The version that settings.yaml and cpu.py are written for."""

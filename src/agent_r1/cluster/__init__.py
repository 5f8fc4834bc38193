"""Run the same episodes, masks, rewards, advantages and losses on verl (Ray, FSDP2, vLLM).

This package only adapts; everything about agents is imported from rollout/ and training/.

    launch.py       the user's process: checks, starts and watches the driver, shows progress
    driver.py       the child process: starts its own Ray and gives verl its configuration
    compose.py      our Config -> verl's Hydra configuration, by settings.yaml
    trainer.py      verl's synchronous trainer with our advantages, metrics and checkpoints
    agent_loop.py   verl's agent loop: its server client as our Policy, in our episode loop
    algorithms.py   our estimators, policy loss and learning rate under the names that verl looks up
    checkpoints.py  FSDP shards -> a Hugging Face folder
    cpu.py          "cpu" as a platform of verl

Only the modules that need verl, Ray and vLLM import them. Without them, everything but `--engine
verl` works; `requirements/verl-cpu.txt` installs them.
"""

VERL = "0.9.1"
"""The version that settings.yaml and cpu.py are written for."""

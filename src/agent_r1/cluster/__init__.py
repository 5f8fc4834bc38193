"""Run the same episodes, masks, rewards, advantages and losses on GPUs and clusters (verl, vLLM).

The wing stands above the program (`app/`), which names it in tables only (config/names.toml). It
only adapts; everything about agents is imported from rollout/ and training/.

    engine.py        what the stages, the plan and doctor ask of `--engine verl`
    plan.py          memory, disk, hours and cost on GPUs; hardware.py has their data sheets
    doctor.py        what a machine with GPUs must have
    gpu_check.py     a rehearsal of a preset with a tiny model
    commands.py      `agent-r1 gpu-check` on the command line
    serve.py         a vLLM server, started by vllm_start.py

    launch.py        the user's process: checks, starts and watches the driver, shows progress
    watchdog.py      when a run is over: a worker is gone, or nothing moves
    driver.py        the child process: starts its own Ray and gives verl its configuration
    compose.py       our Config -> verl's Hydra configuration, by settings.yaml
    trainer.py       verl's synchronous trainer with our advantages, metrics and checkpoints
    replay.py        verl's buffer of episodes, which names those that are missing
    agent_loop.py    verl's agent loop: its server client as our Policy, in our episode loop
    algorithms.py    our estimators, policy loss and learning rate under the names verl looks up
    checkpoints.py   FSDP shards -> a Hugging Face folder
    no_flash_attn.py packed rows and log-probabilities where flash-attn is missing
    real_update.py   an update of real size for `agent-r1 gpu-check`
    settings.py      the section `verl.*` of our Config
    cpu.py           "cpu" as a platform of verl

Only the modules that need verl, Ray and vLLM import them. Without them, everything but `--engine
verl` works; `requirements/verl-cpu.txt` installs them.
"""

VERL = "0.9.1"
"""The version that settings.yaml, cpu.py, no_flash_attn.py and trainer.py are written for."""

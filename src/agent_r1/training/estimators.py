"""All estimators by name: `ESTIMATORS["grpo"]`. `advantages.py` has grpo and ppo, recipes/credit
the others."""

from agent_r1.config import tables

ESTIMATORS = {
    name: tables.resolve("estimator", name, "algorithm") for name in tables.names("estimator")
}

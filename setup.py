"""Put the recipes into the distribution as the package `agent_r1_recipes`.

pyproject.toml has everything else. It can search one folder for packages, and these are in two.
"""

from setuptools import find_namespace_packages, setup

core = find_namespace_packages("src", include=["agent_r1", "agent_r1.*"])
recipes = find_namespace_packages("recipes", exclude=["*.tests", "*.tests.*", "*__pycache__"])

setup(
    packages=[*core, "agent_r1_recipes", *(f"agent_r1_recipes.{name}" for name in recipes)],
    package_dir={"": "src", "agent_r1_recipes": "recipes"},
)
